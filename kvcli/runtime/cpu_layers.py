"""Run the work between the attention of two layers on a CPU in few loops, for a few rows at a time.

A step takes the time of reading the weights; one launch per linear layer and six torch functions per norm would add
more than that in a small model. So a decoder layer is one loop, from what attention gave to the queries, keys and
values of the next layer. Where a step only attends to rows in order, perhaps after it speculated among pages, all
layers with their attention are one loop.
Prompts go through the model's own code, its linear layers through oneDNN.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from typing_extensions import override

from kvcli.kernels import decode_attention, narrow_attention, speculation
from kvcli.kernels.chain import Chain, Gate, Normalised, Products, Stage, TurnedHeads
from kvcli.kernels.decode_attention import AttentionInChain
from kvcli.kernels.gemv import MOST_ROWS
from kvcli.kernels.narrow_attention import ChainTokens, NarrowAttentionInChain, TileFormat
from kvcli.kernels.norm_rope import Rotation, norm_cpu, rotate_cpu
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.speculation import Pages, Speculated, SpeculationInChain
from kvcli.models.auto import layers_of
from kvcli.models.weights import is_plain
from kvcli.runtime.attention_hook import AttendsInChain
from kvcli.runtime.fused import Kernels, Parts, Turning, fused_by, gated_of, norm_of, parts_of, projections_of, replaced
from kvcli.runtime.linear import by_memory, cpu_linears, few, is_packed, matrix_of, rows_of, suits_gemv

MOST = 1 << 16
"""Numbers up to which a single-threaded loop is faster for a norm or a rotation."""


@contextmanager
def cpu_layers(model: PreTrainedModel) -> Iterator[None]:
    """Run a few rows by loops, and linear layers of more rows at the memory's speed, if possible."""
    linears: Any = (module for module in model.modules() if _knows(module))
    loops = any(map(suits_gemv, linears))
    found = [WholeLayer.of(layer) for layer in layers_of(model)] if loops else []
    whole = [layer for layer in found if layer is not None]
    with fused_by(CpuKernels(), model) if loops else nullcontext(), cpu_linears(model), ExitStack() as left:
        for layer in whole:
            layer.enter(left)
        if len(whole) == len(found) > 1:
            AllLayers(whole)
        yield


def _knows(linear: object) -> bool:
    return is_plain(linear) or is_packed(linear)


class CpuKernels(Kernels):
    """Loops, for as many rows as they are faster for."""

    @override
    def serve(self, x: Tensor) -> bool:
        return x.numel() <= MOST and few(x)

    @override
    def knows(self, linear: object) -> bool:
        return _knows(linear)

    @override
    def alone(self, linear: nn.Linear) -> Callable[[Tensor], Tensor]:
        return by_memory(linear)

    @override
    def together(self, linears: Sequence[nn.Linear]) -> Callable[[Tensor], Sequence[Tensor]]:
        each, sizes = [by_memory(linear) for linear in linears], [linear.out_features for linear in linears]
        if not all(map(suits_gemv, linears)):
            return lambda x: [product(x) for product in each]
        multiply = Chain(["x"], [Products("x", "out", list(map(matrix_of, linears)))], ["out"])

        def products(x: Tensor) -> Sequence[Tensor]:
            if (rows := rows_of(x)) is None:
                return [product(x) for product in each]
            return torch.split(multiply(rows)[0].view(*x.shape[:-1], -1), sizes, -1)

        return products

    @override
    def gated(self, gate: nn.Linear, up: nn.Linear) -> Callable[[Tensor], Tensor]:
        by_gate, by_up = by_memory(gate), by_memory(up)
        if not (suits_gemv(gate) and suits_gemv(up)):
            return lambda x: functional.silu(by_gate(x)) * by_up(x)
        multiply = Chain(["x"], [Gate("x", "out", matrix_of(gate), matrix_of(up))], ["out"])

        def product(x: Tensor) -> Tensor:
            if (rows := rows_of(x)) is None:
                return functional.silu(by_gate(x)) * by_up(x)
            return multiply(rows)[0].view(*x.shape[:-1], -1)

        return product

    @override
    def norm(self, x: Tensor, weight: Tensor, eps: float, shift: float) -> Tensor:
        return norm_cpu(x, weight.detach(), eps, shift)

    @override
    def rotate(self, q: Tensor, k: Tensor, rotation: Rotation) -> None:
        rotate_cpu(q, k, rotation)


class Attending(NamedTuple):
    """A layer's loop up to queries, keys and values, and where they go."""

    hook: Any
    layer: int
    stages: Sequence[Stage]
    begin: Chain
    softmax: Softmax
    sizes: Sequence[int]
    size: int

    @property
    def suits_chain(self) -> bool:
        """Whether the loops of a chain do its attention."""
        return self.softmax.sinks is None and self.sizes[0] <= MOST_ROWS * self.sizes[1]

    def taken_apart(self, products: Tensor, batch: int, n: int) -> Sequence[Tensor]:
        """View rows of products as queries [b, H, n, d], keys and values [b, Hk, n, d]."""
        heads = products.view(batch, n, -1, self.size).transpose(1, 2)
        return heads.split_with_sizes([rows // self.size for rows in self.sizes], 1)


def _suit(angles: Any, batch: int, n: int) -> bool:
    """Tell whether these are a cosine and a sine for each of the tokens."""
    return isinstance(angles, tuple) and all(x.shape[:2] == (batch, n) and x.dtype == torch.float32 for x in angles)


def _moved(value: Any, shift: int) -> Any:
    """Move positions; other arguments stay as they are."""
    return value + shift if isinstance(value, Tensor) and value.dtype == torch.int64 else value


def _close(found: Tensor, wanted: Tensor) -> bool:
    return found.shape == wanted.shape and bool((found - wanted).norm() <= 1e-4 * wanted.norm())


class WholeLayer:
    """A decoder layer in two loops, up to queries, keys and values with their rotation, and from what attention gave.

    Its attention module must do nothing else. It is tried out at the first step, on random numbers; a layer whose
    module does more, or that somebody listens to, runs by its own code.
    """

    def __init__(self, layer: nn.Module, parts: Parts, projections: Sequence[nn.Linear], output: nn.Linear):
        self.layer, self.output, self.attention = layer, output, cast(Any, parts.attention)
        self.norm, second, mlp = parts.before_attention, norm_of(parts.before_mlp), gated_of(parts.mlp, _knows)
        first = norm_of(self.norm)
        assert first is not None
        assert second is not None
        assert mlp is not None
        gate, up, down = map(matrix_of, mlp)
        self.sizes = [linear.out_features for linear in projections]
        products = Products("normed", "products", list(map(matrix_of, projections)))
        self.before: list[Stage] = [Normalised("x", "normed", *first), products]
        after: list[Stage] = [
            Products("attended", "sum", [matrix_of(output)], plus="x"),
            Normalised("sum", "normed", *second),
            Gate("normed", "inner", gate, up),
            Products("inner", "out", [down], plus="sum"),
        ]
        self.after, self.end = after, Chain(["x", "attended"], after, ["out"])
        own_norms = [getattr(self.attention, name, None) for name in ("q_norm", "k_norm")]
        self.head_norms = [norm_of(norm) if isinstance(norm, nn.Module) else None for norm in own_norms]
        passed = [*parts, *mlp, *projections, output, *own_norms]
        self.passed = [vars(module) for module in passed if isinstance(module, nn.Module)]
        heard = vars(self.attention)["_forward_pre_hooks"]
        self.listeners = [each for each in _listeners(self.passed) if each is not heard]
        self.tried = False
        self.own: Attending | None = None
        self.all: AllLayers | None = None

    @classmethod
    def of(cls, layer: nn.Module) -> WholeLayer | None:
        """Recognise a layer all of whose weights have loops; None for any other."""
        parts = parts_of(layer, _knows)
        if parts is None or not hasattr(parts.attention, "kvcli_hook"):
            return None
        projections, output = projections_of(parts.attention, _knows), getattr(parts.attention, "o_proj", None)
        linears: Any = [*projections, output, *(gated_of(parts.mlp, _knows) or ())]
        norms: Any = [parts.before_attention.weight, parts.before_mlp.weight]
        if not projections or not all(_knows(linear) and suits_gemv(linear) for linear in linears):
            return None
        queries, keys, values = (linear.out_features for linear in projections)
        size = getattr(parts.attention, "head_dim", None) or queries + 1
        alike = keys == values and queries % size == keys % size == 0 and linears[3].in_features == queries
        if not alike or not all(few(norm.detach()) for norm in norms):
            return None
        return cls(layer, parts, projections, linears[3])

    def enter(self, left: ExitStack) -> None:
        """Run the layer, once its modules run by loops."""
        self.forwards = [own.get("forward") for own in self.passed]
        self.forward = self._forward(self.layer.forward)
        left.enter_context(replaced(self.layer, "forward", self.forward))

    def _forward(self, before: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(hidden_states: Tensor, *args: Any, **given: Any) -> Tensor:
            if self.all is not None and (out := self.all.through(self, hidden_states, args, given)) is not None:
                return out
            x, angles = rows_of(hidden_states) if few(hidden_states) else None, given.get("position_embeddings")
            (batch, n, _), own = hidden_states.shape, None
            # Only the layer itself knows what `args` are.
            if x is not None and not args and _suit(angles, batch, n) and not self.watched():
                own = self.own if self.own is not None or self.tried else self._try(hidden_states, given)
            if x is None or angles is None or own is None:
                return before(hidden_states, *args, **given)
            rows, together = [angle.flatten(0, 1) for angle in angles], self.all
            products = None if together is None else together.ready(self, hidden_states, angles)
            if products is None:
                products, normed = own.begin(x, *rows)
                if own.hook.heard is not None:
                    own.hook.heard(own.layer, normed.view(hidden_states.shape))
            attended = own.hook.attend(own.layer, *own.taken_apart(products, batch, n), own.softmax)
            ends = x, attended.reshape(batch * n, -1)
            if together is None:
                return self.end(*ends)[0].view(hidden_states.shape)
            following = together.after()
            out, *more = self.end(*ends) if following is None else following(*ends, *rows)
            return together.note(angles, out.view(hidden_states.shape), *more)

        return forward

    def _try(self, hidden: Tensor, given: dict[str, Any]) -> Attending | None:
        """Compare queries, keys, values and the output with what the attention module makes of random numbers.

        It is given other positions as well, which must not matter once their angles are known.
        """
        hook, layer, size = self.attention.kvcli_hook, self.attention.kvcli_layer, self.attention.head_dim
        usual = hook.latents[layer] is None and hook.temperatures[layer] is None and hook.index is None
        if not usual or hook.handler is None or self.attention in hook.readers or "forward" in vars(self.attention):
            return None
        self.tried = True
        (batch, n, _), random = hidden.shape, torch.Generator().manual_seed(0)
        x, *angles = (torch.randn(like.shape, generator=random) for like in (hidden, *given["position_embeddings"]))
        answer = torch.randn(batch, n, self.sizes[0] // size, size, generator=random)
        made, ended, asked = torch.empty_like(hidden), list[Tensor](), list[tuple[Any, ...]]()

        def attend(_: int, *what: Any) -> Tensor:
            asked.append(what)
            return answer

        def project(attended: Tensor) -> Tensor:
            ended.append(attended)
            return made

        with (
            replaced(hook, "handler", attend),
            replaced(hook, "heard", None),
            replaced(self.output, "forward", project),
        ):
            for shift in (0, 1 << 20):
                moved = {name: _moved(value, shift) for name, value in given.items()}
                moved["position_embeddings"] = tuple(angles)
                found = self.attention(hidden_states=self.norm(x), **moved)[0]
                if found is not made or not torch.equal(ended[-1].reshape(answer.shape), answer):
                    return None
        if len(asked) != 2 or asked[0][3].selected is not None or asked[0][3][:2] != asked[1][3][:2]:
            return None
        for turned in (True, False):
            stages = self._stages(angles[0].shape[-1], turned)
            begin = Chain(["x", "cos", "sin"], stages, ["products", "normed"])
            own = Attending(hook, layer, stages, begin, asked[0][3], self.sizes, size)
            products, _ = own.begin(x.flatten(0, 1), *(angle.flatten(0, 1) for angle in angles))
            mine = own.taken_apart(products, batch, n)
            if all(_close(a, b) for what in asked for a, b in zip(mine, what[:3], strict=True)):
                self.own = own
                break
        return self.own

    def _stages(self, width: int, turned: bool) -> list[Stage]:
        """List what leads to queries, keys and values."""
        size, columns = self.attention.head_dim, self.sizes
        turning = getattr(sys.modules[type(self.attention).__module__], "apply_rotary_pos_emb", None)
        turn = turning.tables(size, width, torch.device("cpu")) if turned and isinstance(turning, Turning) else None
        stages = list(self.before)
        for first, rows, norm in zip((0, columns[0]), columns, self.head_norms, strict=False):
            if turn is not None or norm is not None:
                stages.append(TurnedHeads("products", first, rows // size, size, norm, turn, width))
        return stages

    def watched(self) -> bool:
        """Tell whether somebody listens to a module, or replaced what it does; who `heard` attention inputs is told."""
        more = len(self.attention._forward_pre_hooks) > (self.attention.kvcli_hook.heard is not None)
        return more or any(self.listeners) or [own.get("forward") for own in self.passed] != self.forwards


class AllLayers:
    """The layers of a decoder, where each of them takes what the one before it gave, which the first step shows.

    For one sequence they are one loop with their attention where a method allows it. Otherwise a layer's loop after
    attention goes on to the queries, keys and values of the next layer.
    """

    def __init__(self, layers: Sequence[WholeLayer]):
        self.layers = layers
        self.passed = [own for layer in layers for own in (vars(layer.layer), *layer.passed)]
        self.listeners, self.forwards = _listeners(self.passed), [own.get("forward") for own in self.passed]
        for layer in layers:
            layer.all = self
        self.at = 0  # the layer whose turn is next
        self.given: tuple[Any, Any] = (None, None)  # its hidden states and angles, if layers follow each other
        self.products: Tensor | None = None  # its queries, keys and values, if they are made already
        self.seen = False  # whether all layers were seen to follow each other
        self.further: dict[int, Chain] = {}  # the loops from a layer's attention to that of the next
        self.whole = dict[Any, OneLoop]()  # by how layers speculate
        self.passing: Tensor | None = None  # what the last layer gives, until its turn is over

    def through(self, layer: WholeLayer, hidden: Tensor, args: tuple[Any, ...], given: dict[str, Any]) -> Tensor | None:
        """Run all layers at the first one's turn, and let what they give pass the others.

        None means that a layer has to run by itself.
        """
        if hidden is self.passing and layer is self.layers[self.at]:
            self.at += 1
            if self.at == len(self.layers):
                self.passing, self.at = None, 0
            return hidden
        self.passing = None
        if layer is self.layers[0] and not args and given.get("attention_mask") is None:
            self.passing = self._step(hidden, given.get("position_embeddings"))
            self.at = 0 if self.passing is None else 1
        return self.passing

    def _step(self, hidden: Tensor, angles: Any) -> Tensor | None:
        """Run all layers on a token's hidden states [1, 1, D], if its step can be one loop."""
        if not self.seen or hidden.shape[:2] != (1, 1) or not few(hidden) or not _suit(angles, 1, 1):
            return None
        own = [cast(Attending, layer.own) for layer in self.layers]
        handler = own[0].hook.handler
        if not isinstance(handler, AttendsInChain) or not all(each.suits_chain for each in own):
            return None
        if any(self.listeners) or [its.get("forward") for its in self.passed] != self.forwards:
            return None
        of_layer = {each.layer: each.softmax for each in own}
        step = handler.in_chain([of_layer[at] for at in range(len(own))])
        if step is None or any(tokens.kv.dtype != torch.float32 for tokens, _ in step):
            return None
        kind = tuple((tokens.form, None if pages is None else pages.how.pooling) for tokens, pages in step)
        if kind not in self.whole:
            self.whole[kind] = OneLoop(self.layers, kind)
        out, found = self.whole[kind](hidden[0], [angle[0] for angle in angles], step)
        handler.take_rows(found)
        return out[None]

    def ready(self, layer: WholeLayer, hidden: Tensor, angles: Any) -> Tensor | None:
        """Return queries, keys and values of a layer that runs by itself, if the loop of the last one made them."""
        if layer is self.layers[0]:
            self.at, self.given, self.products = 0, (hidden, angles), None
        if layer is self.layers[self.at] and hidden is self.given[0] and angles is self.given[1]:
            return self.products
        self.given = None, None
        return None

    def after(self) -> Chain | None:
        """Return the loop from the attention of the layer whose turn it is to that of the next, if there is one."""
        at = self.at
        if not self.seen or self.given[0] is None or at + 1 == len(self.layers):
            return None
        if cast(Attending, self.layers[at].own).hook.heard is not None:  # wants to know in between
            return None
        following = self.layers[at + 1]
        its = vars(following.layer)
        if following.own is None or its["forward"] is not following.forward or any(_listeners([its])):
            return None
        if following.watched():
            return None
        if at not in self.further:
            stages = [*self.layers[at].after, *[_reading("out", stage) for stage in following.own.stages]]
            self.further[at] = Chain(["x", "attended", "cos", "sin"], stages, ["out", "products"])
        return self.further[at]

    def note(self, angles: Any, out: Tensor, products: Tensor | None = None) -> Tensor:
        """Keep for the next layer what the last one gave, and return that."""
        if self.given[0] is not None:
            self.at, self.given, self.products = self.at + 1, (out, angles), products
            if self.at == len(self.layers):
                self.at, self.given, self.seen = 0, (None, None), True
        return out


class OneLoop:
    """All layers of a step of one sequence, with their attention and perhaps their speculation.

    `kinds` has an entry for each layer, by the numbers that methods give layers: the form of the tokens in tiles, and
    how queries are pooled where the layer speculates; None where it has no tiles, or does not.
    """

    def __init__(self, layers: Sequence[WholeLayer], kinds: Sequence[tuple[TileFormat | None, Any]]):
        self.attention, self.speculation = dict[int, AttentionInChain](), dict[int, SpeculationInChain]()
        stages = list[Stage]()
        for layer in layers:
            own = cast(Attending, layer.own)
            at, heads, kv_heads = own.layer, *(rows // own.size for rows in own.sizes[:2])
            form, pooling = kinds[at]
            if form is None:
                attention = AttentionInChain(heads, kv_heads, own.size, own.softmax)
            else:
                attention = NarrowAttentionInChain(heads, kv_heads, form, own.softmax)
            self.attention[at], its = attention, attention.stages("products", "attended", at)
            if pooling is not None:
                self.speculation[at] = speculates = SpeculationInChain(heads, kv_heads, own.size, pooling)
                row = len(layers) + at
                its = [*speculates.before("products", row), *its, *speculates.after("products", row)]
            stages += [_reading("out" if stages else "x", stage) for stage in [*own.stages, *its, *layer.after]]
        self.chain = Chain(["x", "cos", "sin"], stages, ["out"])
        told = max(each.TOLD for each in (decode_attention, narrow_attention, speculation))
        self.told = np.zeros((2 * len(layers), told), np.int64)

    def __call__(
        self, x: Tensor, angles: Sequence[Tensor], step: Sequence[tuple[ChainTokens, Pages | None]]
    ) -> tuple[Tensor, Sequence[Speculated | None]]:
        """Run on rows x [1, D]; return what the last layer gives, and what speculation found in each layer."""
        needs, found, numbers = [0], list[Speculated | None](), 0
        for at, (tokens, pages) in enumerate(step):
            needs.append(self.attention[at].room(tokens))
            if pages is not None:
                needs.append(self.speculation[at].room(pages))
        room = x.new_empty(max(needs))  # stages follow each other
        for at, (tokens, pages) in enumerate(step):
            numbers += self.attention[at].tell(self.told[at], tokens, room.data_ptr())
            row = self.told[len(step) + at]
            found.append(None if pages is None else self.speculation[at].tell(row, pages, room.data_ptr()))
        (out,) = self.chain(x, *angles, told=self.told, numbers=numbers)
        return out, found


def _listeners(modules: Sequence[dict[str, Any]]) -> list[Any]:
    """List what holds the listeners of modules, given by their variables; where one is not empty, somebody listens."""
    return [own[kind] for own in modules for kind in ("_forward_hooks", "_forward_pre_hooks")]


def _reading(x: str, stage: Stage) -> Stage:
    """Let a stage that reads a layer's input read it by another name."""
    if isinstance(stage, Products) and stage.plus == "x":
        return stage._replace(plus=x)
    return stage._replace(x=x) if stage.x == "x" else stage
