"""Targets that end in tensors: what a method needs for a model, found once on text, in a file next to a profile.

- RazorAttention's retrieval heads, by echo and induction score (arXiv 2407.15891, section 3.2), on random tokens that
repeat (`kvcli.runtime.retrieval_heads`), as the method itself finds them without a file; text is not used.
- Loki's principal axes of the keys (arXiv 2406.02542, section 4), by the covariance of each prompt's keys, and
InfiniGen's skew (arXiv 2406.19707, section 4), by the moments of queries and keys, both summed over the prompts.
- DuoAttention's gates, one per KV head, by optimisation (arXiv 2410.10819, section 2.2):

    out_h = gate_h full_h + (1 - gate_h) near_h      loss = mean |H - H'|^2 + 0.05 mean gate

Here full is attention to everything and near attention to sinks and window; H and H' are the last hidden states at the
answer of a passage, of the original model and with gates. Weights do not change. Gates begin at 1 and stay within 0 and
1. The passages are the built-in ones, needles in a long text with a question about them, instead of the paper's ten
passkeys. Each is used `ROUNDS` times, in one forward and backward pass of the model: 320 passes for 16 passages, where
the paper takes 2,000. The profile's sinks and window define near; the paper's gates have twice the sinks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.profiles import Profile, resolve_profile
from kvcli.kernels.block_attention import add_sinks, block_attention_ref
from kvcli.kernels.key_bases import centred_moments, principal_axes, second_moments, skew_of
from kvcli.kernels.prefill_attention import prefill_attention_ref
from kvcli.kernels.softmax import Softmax
from kvcli.kv.calibration_file import tensor_name
from kvcli.methods.duoattention import DuoAttentionConfig
from kvcli.methods.razor import Razor
from kvcli.models.geometry import LayerGeometry
from kvcli.quality.calibrate.sweep import methods_with
from kvcli.quality.fidelity import Passage
from kvcli.runtime.engine import Engine
from kvcli.runtime.not_finite import check_finite
from kvcli.runtime.prefill import PrefillConsumer
from kvcli.runtime.retrieval_heads import HeadScores
from kvcli.ui.summary import Table


class TensorFinder(PrefillConsumer, ABC):
    """Finds tensors during an exact prefill of every passage, for the layers that are not sliding windows."""

    query_rows = 0

    def __init__(self, profile: Profile, layers: Sequence[LayerGeometry]):
        self.profile = profile
        self.layers = {layer.index: layer for layer in layers if layer.window is None}

    def read(self, engine: Engine, passage: Passage, advance: Callable[[int], None]) -> None:
        """Read a whole passage as one prompt.

        Raises:
            KvcliError: NaN or infinity in the model's logits.
        """
        ids = [*passage.prompt, *passage.continuation]
        check_finite(engine, engine.prefill_into(ids, self, advance), ids)

    @override
    def observe(self, layer: int, q: Tensor, k: Tensor, softmax: Softmax) -> None:
        pass

    @override
    def prefill(self, layer: int, k: Tensor, v: Tensor, q: Tensor, softmax: Softmax) -> None:
        pass

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by the names that the method looks for."""

    @abstractmethod
    def tables(self) -> list[tuple[str, Table]]:
        """Return tables that describe the tensors, each with its title."""


@dataclass(frozen=True)
class TensorTarget:
    """A target that ends in a file: the setting that names the file, its default method, and its finder."""

    name: str
    method: str
    source: Callable[[Profile, Sequence[LayerGeometry]], TensorFinder]
    reads_text: bool = True

    def check(self, profile: Profile, files: Sequence[str]) -> None:
        """Refuse a method that has no use for the tensors, and text for a target that reads none.

        Raises:
            KvcliError: one of the two was given (usage).
        """
        if files and not self.reads_text:
            raise KvcliError(
                f"{self.name} are not found on text, but {files[0]} was given", "leave it out", ExitCode.USAGE
            )
        if self.name not in type(profile.settings).model_fields:
            hint = f"methods that do: {methods_with(self.name)}"
            raise KvcliError(f"{profile.method} takes no {self.name} file", hint, ExitCode.USAGE)


def is_ours(path: Path) -> bool:
    """Tell whether `TensorCalibration.tensor_file` made a file, by the provenance in its header."""
    try:
        with safe_open(path, framework="pt") as file:
            return "provenance" in (file.metadata() or {})
    except (OSError, SafetensorError):
        return False


def eighths(width: int) -> list[int]:
    """Return an eighth of a width, two eighths and so on, for tables."""
    return sorted({max(1, width * eighth // 8) for eighth in range(1, 9)})


def layer_table(title: str, columns: Iterable[str], cells: Iterable[tuple[int, Sequence[str]]]) -> tuple[str, Table]:
    """Tabulate cells by layer; a layer with fewer cells than others has "-" for the rest."""
    heads = ("layer", *columns)
    return title, Table(heads, [(f"{layer}", *own, *["-"] * (len(heads) - 1 - len(own))) for layer, own in cells])


class Heads(TensorFinder):
    """Finds one tensor, `heads`: bool [layers, KV heads]."""

    def __init__(self, profile: Profile, layers: Sequence[LayerGeometry]):
        super().__init__(profile, layers)
        self.kept = torch.zeros(len(layers), max(layer.num_kv_heads for layer in layers), dtype=torch.bool)
        self.scores: HeadScores | None = None

    def read(self, engine: Engine, passage: Passage, advance: Callable[[int], None]) -> None:
        """Let the method find its heads, once for all passages.

        Raises:
            KvcliError: NaN or infinity in the scores.
        """
        if self.scores is None:
            overrides = self.profile.settings.model_dump() | {"heads": ""}
            method = engine.method(resolve_profile("razor", overrides=overrides), engine.context(passage.capacity, 0))
            assert isinstance(method, Razor)
            for layer, keep in method.keep.items():
                self.kept[layer, : len(keep)] = keep
            self.scores = engine.prepared("head_scores")
            check_finite(engine, self.scores.echo[list(self.layers)], passage.prompt)
        advance(engine.depth * passage.capacity)

    @override
    def tensors(self) -> dict[str, Tensor]:
        return {"heads": self.kept}

    @override
    def tables(self) -> list[tuple[str, Table]]:
        if self.scores is None:
            return []
        found = (self.scores.echo, self.scores.induction, self.kept)
        cells = (
            (
                layer,
                [
                    f"{float(echo):.3f} · {float(induction):.3f}{' kept' if keep else ''}"
                    for echo, induction, keep in zip(*(each[layer] for each in found), strict=True)
                ],
            )
            for layer in self.layers
        )
        columns = (f"KV head {head}" for head in range(self.kept.shape[1]))
        return [layer_table("Echo and induction score of every KV head", columns, cells)]


class MomentFinder(TensorFinder):
    """Finds an orthogonal matrix [Hk, d, d] of every layer, the strongest columns first."""

    title: str
    """Describes the quantity whose share the first columns hold."""

    def __init__(self, profile: Profile, layers: Sequence[LayerGeometry]):
        super().__init__(profile, layers)
        self.queries: dict[int, Tensor] = {}  # layer -> [Hk, d, d]
        self.keys: dict[int, Tensor] = {}

    @abstractmethod
    def matrix(self, layer: int) -> Tensor:
        """Return the matrix of a layer."""

    @abstractmethod
    def strength(self, layer: int, matrix: Tensor) -> Tensor:
        """Return the strength of each column, [Hk, d]."""

    @override
    def tensors(self) -> dict[str, Tensor]:
        return {tensor_name(layer): self.matrix(layer).float().cpu().contiguous() for layer in sorted(self.keys)}

    @override
    def tables(self) -> list[tuple[str, Table]]:
        shown = eighths(max(moments.shape[1] for moments in self.keys.values()))
        cells = []
        for layer in sorted(self.keys):
            parts = self.strength(layer, self.matrix(layer))
            held = (parts.cumsum(1) / parts.sum(1, keepdim=True)).mean(0)  # [d]
            cells.append((layer, [f"{100 * float(held[min(count, len(held)) - 1]):.1f} %" for count in shown]))
        return [layer_table(f"{self.title}, mean over the KV heads", map(str, shown), cells)]


class Axes(MomentFinder):
    """Finds principal axes of the keys."""

    title = "Variance of the keys within the first axes"

    @override
    def prefill(self, layer: int, k: Tensor, v: Tensor, q: Tensor, softmax: Softmax) -> None:
        if layer in self.layers:
            self.keys[layer] = centred_moments(k) + self.keys.get(layer, 0)

    @override
    def matrix(self, layer: int) -> Tensor:
        return principal_axes(self.keys[layer])

    @override
    def strength(self, layer: int, matrix: Tensor) -> Tensor:
        return (matrix * (self.keys[layer] @ matrix)).sum(1).clamp(min=0)


class Skew(MomentFinder):
    """Finds directions in which queries and keys are both long."""

    title = "Product of queries and keys within the first columns"

    @override
    def observe(self, layer: int, q: Tensor, k: Tensor, softmax: Softmax) -> None:
        if layer in self.layers:
            by_group = q.reshape(k.shape[0], -1, q.shape[-1])  # [Hk, G * n, d]
            self.queries[layer] = second_moments(by_group) + self.queries.get(layer, 0)

    @override
    def prefill(self, layer: int, k: Tensor, v: Tensor, q: Tensor, softmax: Softmax) -> None:
        if layer in self.layers:
            self.keys[layer] = second_moments(k) + self.keys.get(layer, 0)

    @override
    def matrix(self, layer: int) -> Tensor:
        return skew_of(self.queries[layer], self.keys[layer])

    @override
    def strength(self, layer: int, matrix: Tensor) -> Tensor:
        squares = ((matrix * (each[layer] @ matrix)).sum(1).clamp(min=0) for each in (self.queries, self.keys))
        queries, keys = (each.sqrt() for each in squares)
        return queries * keys


ROUNDS = 20
LEARNING_RATE, SPARSITY = 0.02, 0.05  # of AdamW, and of the gates' mean in the loss: section 3.1


class Gates(TensorFinder):
    """Finds one tensor, `gates`: fp32 [layers, KV heads]; 0 if a layer has no such head, 1 in sliding-window layers."""

    def __init__(self, profile: Profile, layers: Sequence[LayerGeometry]):
        super().__init__(profile, layers)
        self.all_layers = layers
        most = max(layer.num_kv_heads for layer in layers)
        self.gates = torch.zeros(len(layers), most)
        for layer in layers:
            self.gates[layer.index, : layer.num_kv_heads] = 1
        self.optimiser: torch.optim.Optimizer | None = None

    def read(self, engine: Engine, passage: Passage, advance: Callable[[int], None]) -> None:
        """Lower the gates on one passage.

        Raises:
            KvcliError: NaN or infinity in the model's hidden states.
        """
        ids, asked = [*passage.prompt, *passage.continuation], len(passage.continuation)
        engine.rope.use([passage.capacity])
        with torch.inference_mode(False), torch.enable_grad():  # checkpoints keep no more than a layer's q, k and v
            if self.optimiser is None:
                self.gates = self.gates.to(engine.model.device).requires_grad_()
                self.optimiser = torch.optim.AdamW([self.gates], lr=LEARNING_RATE, weight_decay=0)
            with torch.no_grad():
                expected = self._last_hidden(engine, ids, asked, torch.ones_like(self.gates))
            check_finite(engine, expected, ids)
            for _ in range(ROUNDS):
                self.optimiser.zero_grad()
                found = self._last_hidden(engine, ids, asked, self.gates)
                distance = (found - expected).square().mean()
                (distance + SPARSITY * self.gates[list(self.layers)].mean()).backward()  # type: ignore[no-untyped-call]
                self.optimiser.step()
                with torch.no_grad():
                    self.gates.clamp_(0, 1)
        advance(engine.depth * passage.capacity)

    def _last_hidden(self, engine: Engine, ids: Sequence[int], count: int, gates: Tensor) -> Tensor:
        """Run tokens through the model -> the output layer's inputs for the last `count` of them, [count, D]."""
        seen: list[Tensor] = []
        config = self.profile.settings
        assert isinstance(config, DuoAttentionConfig)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
            this, gate = self.all_layers[layer], gates[layer, : k.shape[1]]
            gated = partial(gated_attention, gate=gate, sink=config.sink, window=config.window)
            sliding = partial(prefill_attention_ref, window=this.window, chunked=this.chunked)
            read = gated if this.window is None else sliding
            out = checkpoint(read, q[0], k[0], v[0], softmax, use_reentrant=False)
            return out.transpose(0, 1)[None]  # type: ignore[no-any-return]

        output = engine.model.module.get_output_embeddings()  # type: ignore[no-untyped-call]
        watch = output.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0].float()))
        try:
            device = engine.model.device
            tokens, positions = torch.tensor([ids], device=device), torch.arange(len(ids), device=device)[None]
            engine.hook.run(attend, tokens, positions, keep=count)
        finally:
            watch.remove()
        return seen[0]

    @override
    def tensors(self) -> dict[str, Tensor]:
        return {"gates": self.gates.detach().cpu()}

    @override
    def tables(self) -> list[tuple[str, Table]]:
        found = self.tensors()["gates"]
        cells = ((layer, [f"{gate:.3f}" for gate in found[layer].tolist()]) for layer in self.layers)
        columns = (f"KV head {head}" for head in range(found.shape[1]))
        return [layer_table("Gate of every KV head: 1 needs everything, 0 sinks and window", columns, cells)]


def gated_attention(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, gate: Tensor, sink: int, window: int) -> Tensor:
    """Attend causally over a prompt: the part `gate` [Hk] to everything, the rest to sinks and window -> [H, n, d].

    q [H, n, d], k and v [Hk, n, d]. Uses the torch reference, so that gradients pass.
    """
    heads, n, groups = len(k), q.shape[1], len(q) // len(k)
    token = torch.arange(n, device=q.device)
    causal = token[:, None] >= token
    near = causal & ((token < sink) | (token > token[:, None] - window))
    rows = q.reshape(heads, groups * n, -1)
    parts = []
    for mask in (causal, near):
        out, lse = block_attention_ref(rows, k, v, softmax, mask.repeat(groups, 1))
        if softmax.sinks is not None:
            out = add_sinks(out, lse, softmax.sinks.view(heads, groups, 1).expand(-1, -1, n).reshape(heads, -1))
        parts.append(out)
    share = gate.to(q.dtype)[:, None, None]
    return (share * parts[0] + (1 - share) * parts[1]).reshape(q.shape)
