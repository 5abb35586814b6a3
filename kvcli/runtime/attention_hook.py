"""The only hook into transformers: one registered attention function that passes queries, keys and values to a handler.

There is no Cache object and no mask: the model is called with `use_cache=False`, so that the function sees only the new
tokens, and transformers builds no L*L mask for an attention name without a mask function. The handler that attends is
responsible for causality. `Hook.run` is the one place that calls the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from inspect import signature
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel

from kvcli.compat import attention_implementation, set_attention
from kvcli.errors import usage_error
from kvcli.kernels.narrow_attention import ChainTokens
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.speculation import Pages, Speculated
from kvcli.kv.selected import with_index
from kvcli.models.auto import layers_of
from kvcli.models.devices import Placement
from kvcli.models.entries import EntryCache
from kvcli.models.geometry import attention_modules, geometry_of_model, reader_modules, state_modules
from kvcli.models.latent import Latent, Temperature, compressed, taken_out
from kvcli.models.layers import cache_argument
from kvcli.models.own_attention import NAME as OWN
from kvcli.models.own_attention import run_noted
from kvcli.runtime.device_transfer import Carrier, DeviceTransfer, on_its_devices
from kvcli.runtime.own_selection import IndexCache, selected_of, selecting
from kvcli.runtime.recurrent import States, stateful
from kvcli.runtime.streamed_weights import StreamedWeights

NAME = "kvcli"


class Handler(Protocol):
    """Attention of one layer for the new tokens of a batch: q [b, H, n, d], k and v [b, Hk, n, d] -> [b, n, H, d]."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """Attend."""


@runtime_checkable
class Reads(Protocol):
    """A handler for models in which layers attend to the KV of an earlier layer, after that one has attended."""

    def read(self, layer: int, q: Tensor, softmax: Softmax) -> Tensor:
        """Attend to the KV of `layer` with the queries of a later one: q [b, H, n, d] -> [b, n, H, d]."""


@runtime_checkable
class AttendsInChain(Protocol):
    """A handler that may do no more than a loop over all layers can, which then does it in its place."""

    def in_chain(self, softmax: Sequence[Softmax]) -> Sequence[tuple[ChainTokens, Pages | None]] | None:
        """Return what a step attends to in every layer, and the pages it speculates among; None if it does more."""

    def take_rows(self, found: Sequence[Speculated | None]) -> None:
        """Count the token that was written to its row in every layer, and take what speculation found there."""


class Hook:
    """Runs one model with a handler's attention; made by `attached`.

    Every attention module of the model points at the hook; `modules` lists them in the order of the layers, `readers`
    has those that read the KV of one of these layers. If layers lie on several devices, `transfer` moves their inputs.
    """

    heard: Callable[[int, Tensor], None] | None = None
    """Gets the input of every layer's attention before that layer attends, where a method looks ahead."""

    def __init__(self, model: PreTrainedModel, modules: Sequence[nn.Module], transfer: DeviceTransfer | None = None):
        self.model, self.modules, self.transfer = model, modules, transfer
        self.geometry, self.readers = geometry_of_model(model), reader_modules(model)
        self.streamed: StreamedWeights | None = None
        self.numbers = [number for number, layer in enumerate(self.geometry.decoder) for _ in layer.attention]
        self.states: States | None = None  # of the current run
        self.latents = [Latent.of(module) for module in modules]
        self.temperatures = [Temperature.of(module) for module in modules]
        self.positions = torch.empty(0)  # [b, n] of the tokens that go through a layer
        self.index: IndexCache | EntryCache | None = None  # of the layer that runs, if it selects by itself
        self.handler: Handler | None = None  # of the current run

    def run(
        self,
        handler: Handler,
        tokens: Tensor,
        positions: Tensor,
        keep: int | slice | Tensor = 1,
        states: States | None = None,
    ) -> Tensor:
        """Run tokens [b, n] at positions [b, n] through the model, each layer attending by `handler`.

        Layers that keep a state continue from `states`; None means that these are the first tokens. Floats [b, n, D]
        are taken in place of the tokens' embeddings. Returns the logits [b, keep, vocab] of the last `keep` tokens, or
        of a slice or list of those that come out of the layers, on the device where tokens go in.
        """
        name = "inputs_embeds" if tokens.is_floating_point() else "input_ids"
        before, self.handler, self.states = (self.handler, self.states), handler, states
        try:
            with self.at(positions), nullcontext() if self.transfer is None else self.transfer.running():
                given = {name: tokens, "position_ids": positions}
                if self.geometry.by_itself:  # a decoder makes the bias of as many keys as a mask has
                    given["attention_mask"] = positions.new_ones(len(positions), int(positions.max()) + 1)
                out = self.model(**given, use_cache=False, logits_to_keep=keep)
        finally:
            self.handler, self.states = before  # a run may come between the chunks of another one
        logits: Tensor = out.logits
        return logits if self.transfer is None else self.transfer.there(logits, self.transfer.first)

    @contextmanager
    def at(self, positions: Tensor) -> Iterator[None]:
        """Set the positions of the tokens that go through a layer within this context."""
        before, self.positions = self.positions, positions
        try:
            yield
        finally:
            self.positions = before

    def tempered(self, layer: int, q: Tensor) -> Tensor:
        """Scale a layer's queries q [b, H, n, d] of the tokens at `positions` if its attention has a temperature."""
        temperature = self.temperatures[layer]
        return q if temperature is None else temperature(q, self.positions.to(q.device))

    @contextmanager
    def ahead(self, layer: int, hidden: Tensor) -> Iterator[Tensor]:
        """Prepare work for a layer before its turn: yield hidden states [b, n, D] on its device, with its weights."""
        if self.transfer is None:
            with nullcontext() if self.streamed is None else self.streamed.lent(self.numbers[layer]):
                yield hidden
            return
        device = next(self.modules[layer].parameters()).device
        with self.on(device):
            yield self.transfer.there(hidden, device)

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Run on this device within this context, if layers lie on several."""
        with nullcontext() if self.transfer is None else self.transfer.on(device):
            yield

    @contextmanager
    def carried(self, carrier: Carrier) -> Iterator[None]:
        """Use `carrier` for transfers between devices within this context."""
        with nullcontext() if self.transfer is None else self.transfer.carried(carrier):
            yield

    @property
    def places(self) -> Sequence[torch.device]:
        """All devices that a run works on, first the one where tokens go in."""
        return [self.model.device] if self.transfer is None else self.transfer.devices

    @property
    def devices(self) -> list[torch.device]:
        """The device of each decoder layer."""
        return [next(layer.parameters()).device for layer in layers_of(self.model)]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """Pass a layer's attention on to the handler of the current run."""
        assert self.handler is not None
        return self.handler(layer, q, k, v, softmax)

    def read(self, layer: int, q: Tensor, softmax: Softmax) -> Tensor:
        """Pass a reader's attention to the KV of `layer` on to the handler of the current run.

        Raises:
            KvcliError: that handler does not serve such models (usage).
        """
        if not isinstance(self.handler, Reads):
            raise usage_error(
                "layers of this model read the KV of others, which this command does not serve", "use another model"
            )
        return self.handler.read(layer, q, softmax)


@contextmanager
def attached(model: PreTrainedModel, placement: Placement | None = None) -> Iterator[Hook]:
    """Route the attention of `model`, placed by `placement`, through the yielded hook; restore the model at the end.

    Two models can be attached at once: the hook belongs to their modules, not to the registered function.
    """
    modules = attention_modules(model)
    with on_its_devices(model, placement) as crossed:
        yield from _routed(model, Hook(model, modules, crossed))


def _routed(model: PreTrainedModel, hook: Hook) -> Iterator[Hook]:
    modules, before = hook.modules, attention_implementation(model)
    for module, layer in [*zip(modules, range(len(modules)), strict=True), *hook.readers.items()]:
        module.kvcli_hook, module.kvcli_layer = hook, layer  # type: ignore[assignment]
    set_attention(model, OWN if hook.geometry.by_itself else NAME)
    try:
        making = {hook.modules[layer.index] for layer in hook.geometry.layers if layer.near}
        keeping = zip(state_modules(model), hook.geometry.states, strict=True)
        states = stateful([each for each in keeping if each[0] not in making], lambda: hook.states)
        with taken_out(modules), compressed(modules), states, selecting(hook), _noting(hook):
            yield hook
    finally:
        set_attention(model, before)
        for module in [*modules, *hook.readers]:
            del module.kvcli_hook, module.kvcli_layer


@contextmanager
def _noting(hook: Hook) -> Iterator[None]:
    """Let attention of modules that attend themselves go through the hook."""
    modules = [hook.modules[layer.index] for layer in hook.geometry.layers if layer.by_itself]
    for module in modules:
        module.forward = _noted(hook, module)
    try:
        yield
    finally:
        for module in modules:
            del module.forward  # back to the method of the class


def _noted(hook: Hook, module: nn.Module) -> Callable[..., Any]:
    """Make the forward of a module that attends itself."""
    forward, taken, cache = module.forward, signature(module.forward), cache_argument(module)

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return _attention(module, q, k, v, None, scaling=scale)[0]

    def run(*args: Any, **kwargs: Any) -> Any:
        given = taken.bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        device = given["hidden_states"].device
        return run_noted(forward, cache, given, hook.positions.to(device), attend)

    return run


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    hook, layer = cast(Hook, module.kvcli_hook), cast(int, module.kvcli_layer)
    if attention_mask is not None and hook.index is None:
        raise RuntimeError("transformers built an attention mask although the attention has no mask function")
    softmax = Softmax(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux)
    if query.stride(-1) != 1:  # torch's kernels read neighbouring channels, whatever the stride says
        query = query.contiguous()
    if module in hook.readers:
        return _as_made(hook.read(layer, query, softmax), value), None
    if isinstance(hook.index, EntryCache):
        assert attention_mask is not None
        key = value = hook.index.rows()
        softmax = softmax._replace(selected=selected_of(given, attention_mask == 0, hook.positions, 1))
    elif hook.index is not None:
        softmax = softmax._replace(selected=selected_of(given, attention_mask, hook.positions, hook.index.block))
        if hook.index.new is not None:
            key, value = with_index(hook.index.new, key, value, hook.geometry.layers[layer])
    query, latent = hook.tempered(layer, query), hook.latents[layer]
    if latent is not None:
        return latent.value(hook.attend(layer, latent.query(query), key, value, softmax)), None
    more = key.shape[-1] - value.shape[-1]
    padded = functional.pad(value, (0, more)) if more else value  # caches keep keys and values in one tensor
    return _as_made(hook.attend(layer, query, key, padded, softmax), value), None


def _as_made(out: Tensor, value: Tensor) -> Tensor:
    """Cut outputs [b, n, H, d] to the size of the layer's values, and make them contiguous: modules view them."""
    return out[..., : value.shape[-1]].contiguous()


AttentionInterface.register(NAME, _attention)
