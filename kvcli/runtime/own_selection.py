"""Layers that select by themselves: transformers' own modules compute, on index keys that kvcli holds.

DeepSeek Sparse Attention (arXiv 2512.02556, section 2.1) and its kin score all tokens by a small index and attend to
the best. Within `selecting` each such attention module runs a few queries at a time, so that scores never take more
than `SCORES_AT_ONCE` bytes. It is given a causal mask, and a cache that has the index keys of the run's sequences.
Modules that look at numbers run for one sequence at a time (`OwnSelection.alone`), and so do those that make entries of
several tokens, whose buffers are a state that kvcli holds (`kvcli.models.entries`). What others do in a decode step has
the same form at every step if they score all `room` for tokens (`IndexHolder.room`), and can be captured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import DynamicCache

from kvcli.kernels.page_table import EMPTY
from kvcli.models.auto import rotary_of
from kvcli.models.entries import EntryCache
from kvcli.models.layers import CACHE_ARGUMENTS, LayerGeometry, as_tokens, selection_of
from kvcli.sizes import slices

if TYPE_CHECKING:
    from kvcli.runtime.attention_hook import Handler, Hook

SCORES_AT_ONCE = 1 << 28
"""Bytes of index scores at once."""


@runtime_checkable
class IndexHolder(Protocol):
    """A handler that has the index keys of its sequences."""

    @property
    def room(self) -> int | None:
        """Tokens that are scored at every step, those to come among them; None: those that there are."""

    def index(self, layer: int, keys: Tensor) -> Sequence[Tensor]:
        """Return the index keys [n + m, c] of all tokens of each sequence; `keys` [b, m, c] are the next ones.

        With `room`, they are those of all places for tokens, which nobody looks at before they are taken.
        """

    def apart(self) -> Sequence[Handler]:
        """Return a handler for each sequence."""


class IndexCache:
    """The cache of an attention module: it keeps nothing, and has the index keys of the layer's earlier tokens.

    Afterwards `new` [b, n, c] are the index keys of the new tokens, None if the module has no index of its own, and
    `keys` those of all tokens.
    """

    def __init__(self, layer: LayerGeometry, holder: object):
        assert layer.selects is not None
        self.layer, self.block, self.holder = layer.index, layer.selects.block, holder
        self.new: Tensor | None = None
        self.keys = torch.empty(0)
        self.layers = defaultdict[int, IndexCache](lambda: self)  # some ask their layer's cache

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Return the number of tokens, the new ones included."""
        return self.keys.shape[1]

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keep no keys and values."""
        return key_states, value_states

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:  # noqa: ARG002
        """Return the index keys of all tokens [b, longest, c], the new ones included; shorter sequences end in zeros.

        Raises:
            RuntimeError: this kind of run has no index.
        """
        self.new = indexer_key_states
        whole = _index(self.holder, self.layer, indexer_key_states)
        longest = max(map(len, whole))
        alone = len(whole) == 1  # whose keys are not copied
        self.keys = whole[0][None] if alone else torch.stack([pad(x, (0, 0, 0, longest - len(x))) for x in whole])
        return self.keys

    def update_index(self, idx_k: Tensor) -> Tensor:
        """Do the same for keys [b, 1, n, c]."""
        return self.update_indexer(idx_k[:, 0], self.layer)[:, None]


def _index(holder: object, layer: int, new: Tensor) -> Sequence[Tensor]:
    if not isinstance(holder, IndexHolder):
        raise RuntimeError(f"{type(holder).__name__} has no index, which layer {layer} selects by")
    return holder.index(layer, new)


class Buffers:
    """The buffers of a layer that makes entries, [b, n, c] each, in a run of `hook`."""

    def __init__(self, hook: Hook, layer: LayerGeometry):
        self.hook, self.layer, number = hook, layer.index, hook.numbers[layer.index]
        self.state = hook.geometry.states[sum(each.state is not None for each in hook.geometry.decoder[:number])]
        self.kv = DynamicCache(config=hook.model.config).layers[number]
        self.tensors: Mapping[str, Tensor] = {}

    @contextmanager
    def lent(self, hidden: Tensor) -> Iterator[None]:
        """Have those of all sequences within this context, in which hidden states [b, n, D] go through the layer."""
        states = self.hook.states
        if states is None:  # the first tokens
            new, parts = partial(hidden.new_zeros, len(hidden)), self.state.tensors
            self.tensors = {part.name: new(*part.shape, dtype=part.dtype) for part in parts}
            yield
            return
        held = states.cache(self.state.index)
        self.tensors = held.tensors()
        yield
        held.started = True
        states.done(self.state.index, hidden.shape[1])

    def of(self, row: int, first: int) -> EntryCache:
        """Return the cache of one sequence for tokens from position `first` on."""
        held = {name: tensor[row : row + 1] for name, tensor in self.tensors.items()}
        return EntryCache(self.kv, first, lambda new: _index(self.hook.handler, self.layer, new)[0][None], held)


@contextmanager
def selecting(hook: Hook) -> Iterator[None]:
    """Let the attention modules of layers that select by themselves do so in the runs of `hook`."""
    layers = [layer for layer in hook.geometry.layers if layer.selects is not None]
    modules = [hook.modules[layer.index] for layer in layers]
    for layer, module in zip(layers, modules, strict=True):
        module.forward = _selecting(hook, layer, module)
    try:
        with as_tokens(modules):
            yield
    finally:
        for module in modules:
            del module.forward  # back to the method of the class


def _selecting(hook: Hook, layer: LayerGeometry, module: nn.Module) -> Callable[..., Any]:
    """Make the forward of a module that selects."""
    forward, taken, selects = module.forward, signature(module.forward), layer.selects
    assert selects is not None
    cache = next(name for name in CACHE_ARGUMENTS if name in taken.parameters)
    buffers = Buffers(hook, layer) if layer.near else None

    def run(*args: Any, **kwargs: Any) -> Any:
        given = taken.bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        hidden = given["hidden_states"]  # [b, n, D]
        if selects.all_angles:
            rope: Any = rotary_of(hook.model)
            every = torch.arange(int(hook.positions.max()) + 1, device=hidden.device).expand(len(hidden), -1)
            given["position_embeddings"] = type(rope).forward(rope, hidden, every)
        with nullcontext() if buffers is None else buffers.lent(hidden):
            return a_few_at_once(given) if not selects.alone or len(hidden) == 1 else one_by_one(given)

    def one_by_one(given: Mapping[str, Any]) -> Any:
        outs, rows, whole = list[Any](), len(given["hidden_states"]), hook.handler
        assert isinstance(whole, IndexHolder)
        try:
            for row, hook.handler in enumerate(whole.apart()):
                only = {name: _row(value, row, rows) for name, value in given.items()}
                with hook.at(hook.positions[row : row + 1]):
                    outs.append(a_few_at_once(only, row))
        finally:
            hook.handler = whole
        return joined([*outs, *outs[-1:] * (rows - len(outs))], 0)

    def a_few_at_once(given: Mapping[str, Any], row: int = 0) -> Any:
        (b, n), outs = given["hidden_states"].shape[:2], []
        room = hook.handler.room if isinstance(hook.handler, IndexHolder) else None
        longest = room or int(hook.positions.max()) // layer.rate + 1
        for part in slices(n, max(1, SCORES_AT_ONCE // max(1, b * selects.scratch * longest))):
            positions = hook.positions[:, part].to(given["hidden_states"].device)
            tokens = room or int(positions.max()) + 1
            some = {name: cut(value, part, n) for name, value in given.items()}
            if selects.all_angles:
                some["position_embeddings"] = tuple(each[:, :tokens] for each in given["position_embeddings"])
            if buffers is not None:  # the module adds the mask of entries to one of no tokens
                some["attention_mask"] = some["hidden_states"].new_zeros(1, 1, positions.shape[1], 0)
                hook.index = buffers.of(row, int(positions[0, 0]))
            else:
                if some.get("attention_mask") is None:
                    every = torch.arange(tokens, device=positions.device)
                    some["attention_mask"] = every <= positions[:, None, :, None]
                hook.index = IndexCache(layer, hook.handler)
            some[cache] = hook.index
            try:
                with hook.at(positions):
                    outs.append(forward(**some))
                if isinstance(hook.index, EntryCache):
                    hook.index.store()
            finally:
                hook.index = None
        return joined(outs)

    return run


def selected_of(given: Mapping[str, Any], mask: Tensor | None, positions: Tensor, block: int) -> Tensor:
    """Return the tokens that queries at `positions` [b, n] select: [b, 1 or Hk, n, k], EMPTY for those after them.

    `given` and `mask` are what the module passes to attention. A query with fewer tokens before it than the selection
    is given some that it must not see.
    """
    found = selection_of(given, mask, indexed=True)
    assert found is not None
    indices = found.long()
    if indices.dim() == 3:
        indices = indices[:, None]
    if block > 1:
        tokens = block * indices[..., None] + torch.arange(block, device=indices.device)
        indices = tokens.masked_fill_(indices[..., None] < 0, EMPTY).flatten(-2)
    return torch.where(indices <= positions[:, None, :, None], indices, EMPTY)


def joined(outs: Sequence[tuple[Any, ...]], axis: int = 1) -> Any:
    """Join the outputs of consecutive tokens, tensors [b, n, ..], or along another axis; fill smaller selections up."""
    if len(outs) == 1:
        return outs[0]
    columns = zip(*outs, strict=True)
    return tuple(_joined(column, axis) if isinstance(column[0], Tensor) else column[0] for column in columns)


def _joined(parts: Sequence[Tensor], axis: int) -> Tensor:
    widest = max(part.shape[-1] for part in parts)
    return torch.cat([pad(part, (0, widest - part.shape[-1]), value=EMPTY) for part in parts], axis)


def _row(value: Any, row: int, rows: int) -> Any:
    """Take one of the rows of tensors [b, ..], and of tuples and dictionaries of them."""
    if isinstance(value, tuple):
        return tuple(_row(item, row, rows) for item in value)
    if isinstance(value, dict):
        return {name: _row(item, row, rows) for name, item in value.items()}
    return value[row : row + 1] if isinstance(value, Tensor) and len(value) == rows else value


def cut(value: Any, part: slice | Sequence[int], length: int) -> Any:
    """Cut arguments that are as long as the sequence, and tuples and dictionaries of them.

    These are position ids [1, s], rotary tables ([1, s, d], [1, s, d]), inputs of each layer [1, s, p], and factors of
    queries [1, 1, s, 1].
    """
    if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length:
        return value[:, part]
    if isinstance(value, Tensor) and value.dim() == 4 and value.shape[2] == length:
        return value[:, :, part]
    if isinstance(value, dict):
        return {name: cut(item, part, length) for name, item in value.items()}
    return tuple(cut(item, part, length) for item in value) if isinstance(value, tuple) else value
