"""Layers that select by themselves: transformers' own modules compute, on index keys that kvcli holds.

DeepSeek Sparse Attention (arXiv 2512.02556, section 2.1) and its kin score all tokens by a small index and attend to
the best. Within `selecting` each such attention module runs a few queries at a time, so that scores never take more
than `SCORES_AT_ONCE` bytes. It is given a causal mask, and a cache that has the index keys of the run's sequences.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from kvcli.kernels.page_table import EMPTY
from kvcli.models.layers import CACHE_ARGUMENTS, SELECTIONS, LayerGeometry
from kvcli.sizes import slices

if TYPE_CHECKING:
    from kvcli.runtime.attention_hook import Hook

SCORES_AT_ONCE = 1 << 28
"""Bytes of index scores at once."""


@runtime_checkable
class IndexHolder(Protocol):
    """A handler that has the index keys of its sequences."""

    def index(self, layer: int, keys: Tensor) -> Sequence[Tensor]:
        """Return the index keys [n, c] of all earlier tokens of each sequence; `keys` [b, m, c] are the next ones."""


class IndexCache:
    """The cache of an attention module: it keeps nothing, and has the index keys of the layer's earlier tokens.

    Afterwards `keys` [b, n, c] are those of the new tokens; None if the module has no index of its own.
    """

    def __init__(self, layer: LayerGeometry, holder: object):
        assert layer.selects is not None
        self.layer, self.block, self.holder = layer.index, layer.selects.block, holder
        self.keys: Tensor | None = None
        self.layers = defaultdict[int, IndexCache](lambda: self)  # MiniMax M3 asks its layer's cache

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keep no keys and values."""
        return key_states, value_states

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:  # noqa: ARG002
        """Return the index keys of all tokens [b, longest, c], the new ones included; shorter sequences end in zeros.

        Raises:
            RuntimeError: this kind of run has no index.
        """
        self.keys = indexer_key_states
        if not isinstance(self.holder, IndexHolder):
            raise RuntimeError(f"{type(self.holder).__name__} has no index, which layer {self.layer} selects by")
        earlier = self.holder.index(self.layer, indexer_key_states)
        whole = [torch.cat(each) for each in zip(earlier, indexer_key_states, strict=True)]
        longest = max(map(len, whole))
        return torch.stack([pad(each, (0, 0, 0, longest - len(each))) for each in whole])

    def update_index(self, idx_k: Tensor) -> Tensor:
        """Do the same for keys [b, 1, n, c]."""
        return self.update_indexer(idx_k[:, 0], self.layer)[:, None]


@contextmanager
def selecting(hook: Hook) -> Iterator[None]:
    """Let the attention modules of layers that select by themselves do so in the runs of `hook`."""
    layers = [layer for layer in hook.geometry.layers if layer.selects is not None]
    modules = [hook.modules[layer.index] for layer in layers]
    for layer, module in zip(layers, modules, strict=True):
        assert layer.selects is not None
        module.forward = _a_few_at_once(hook, layer, module, layer.selects.scratch)
    try:
        yield
    finally:
        for module in modules:
            del module.forward  # back to the method of the class


def _a_few_at_once(hook: Hook, layer: LayerGeometry, module: nn.Module, scratch: int) -> Callable[..., Any]:
    forward, taken = module.forward, signature(module.forward)
    cache = next(name for name in CACHE_ARGUMENTS if name in taken.parameters)

    def run(*args: Any, **kwargs: Any) -> Any:
        given = taken.bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        (b, n), outs = given["hidden_states"].shape[:2], []
        longest = int(hook.positions.max()) + 1
        for part in slices(n, max(1, SCORES_AT_ONCE // max(1, b * scratch * longest))):
            positions = hook.positions[:, part].to(given["hidden_states"].device)
            seen = torch.arange(int(positions.max()) + 1, device=positions.device) <= positions[:, None, :, None]
            cut = {name: _cut(value, part, n) for name, value in given.items()}
            hook.index = IndexCache(layer, hook.handler)
            try:
                with hook.at(positions):
                    outs.append(forward(**{**cut, "attention_mask": seen, cache: hook.index}))
            finally:
                hook.index = None
        return joined(outs)

    return run


def selected_of(given: Mapping[str, Tensor | None], positions: Tensor, block: int) -> Tensor:
    """Return the tokens that queries at `positions` [b, n] select: [b, 1 or Hk, n, k], EMPTY for those after them.

    `given` has what the module passes to attention, one of `SELECTIONS`. A query with fewer tokens before it than the
    selection is given some that it must not see.
    """
    indices = next(found for name in SELECTIONS if (found := given.get(name)) is not None).long()
    if indices.dim() == 3:
        indices = indices[:, None]
    if block > 1:
        tokens = block * indices[..., None] + torch.arange(block, device=indices.device)
        indices = tokens.masked_fill_(indices[..., None] < 0, EMPTY).flatten(-2)
    return torch.where(indices <= positions[:, None, :, None], indices, EMPTY)


def joined(outs: Sequence[tuple[Any, ...]]) -> Any:
    """Join the outputs of consecutive tokens, tensors [b, n, ..]; selections of different sizes are filled up."""
    if len(outs) == 1:
        return outs[0]
    return tuple(_joined(column) if isinstance(column[0], Tensor) else column[0] for column in zip(*outs, strict=True))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    widest = max(part.shape[-1] for part in parts)
    return torch.cat([pad(part, (0, widest - part.shape[-1]), value=EMPTY) for part in parts], 1)


def _cut(value: Any, part: slice, length: int) -> Any:
    """Slice tensors [b, length, ..], and tuples of them."""
    if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length:
        return value[:, part]
    return tuple(_cut(item, part, length) for item in value) if isinstance(value, tuple) else value
