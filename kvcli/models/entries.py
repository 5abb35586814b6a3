"""Layers that attend to their last tokens, and to entries that each stand for several tokens (DeepSeek-V4).

Every `rate` tokens make an entry; those since the last one wait in buffers. transformers' module does all of this, on a
cache layer of its own class. `EntryCache` takes that cache's place for a few tokens: it lends the module its buffers
from a state of fixed size, and takes the new token keys and entries out. The entries before are not needed, but for
their keys in the module's index, if it has one. So the module returns which entries its queries attend to.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_ENTRIES, _COUNTS = "compressed_kv", "entry_count"


def makes_entries(kv: object) -> bool:
    """Whether a layer's cache in transformers keeps entries that each stand for several tokens."""
    return hasattr(kv, _ENTRIES)


class EntryCache:
    """The cache of a module for one sequence, whose next token is at position `first`.

    `layer` is transformers' cache layer of the module, which stays empty. `tensors` are the buffers, [1, n, c] each, in
    the form of `tensors()`; None at the start. `index` takes the index keys [1, e, c] of new entries and returns those
    of all [1, E, c]. Afterwards `kv` [1, 1, n, d] has the new tokens' keys, which are also their values.
    """

    def __init__(
        self, layer: Any, first: int, index: Callable[[Tensor], Tensor], tensors: Mapping[str, Tensor] | None = None
    ):
        self.first, self.rate, self.index = first, int(layer.compress_rate), index
        self.kv, self.lent = torch.empty(0), tensors or {}
        self.new: dict[str, Tensor] = {}  # entries [1, e, c] by the names of their kinds: first keys, then an index
        self.own = copy.copy(layer)
        for field, named in vars(layer).items():
            if isinstance(named, dict):
                setattr(self.own, field, dict(named))
        setattr(self.own, _COUNTS, dict.fromkeys(getattr(layer, _COUNTS), first // self.rate))
        for (field, name), held in zip(self._buffers(), self.lent.values(), strict=False):
            # Of the tokens since the last entry there are fewer than make one; others are kept of the last that did.
            filled = first % self.rate if held.shape[1] < self.rate else held.shape[1] * (first >= self.rate)
            getattr(self.own, field)[name] = held[:, :filled] if filled else None
        self.own.update_compressor_states = self.update_compressor_states
        self.layers = defaultdict[int, Any](lambda: self.own)  # the module asks for its own

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Take the new tokens' keys [1, 1, n, d], and return those of none: whoever attends has the tokens."""
        self.kv = key_states
        none = key_states[:, :, :0, :1]
        return none, none

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """Take new entries [1, e, c]; return what stands for all of them, or the index keys of all."""
        main = not self.new
        self.new[name] = compressed
        if not main:
            return self.index(compressed)
        return compressed.new_zeros(1, self.first // self.rate + compressed.shape[1], 1)

    def tensors(self) -> dict[str, Tensor]:
        """Return the buffers, named as those of a recurrence."""
        held = [getattr(self.own, field)[name] for field, name in self._buffers()]
        return {f"recurrent.{number}": tensor for number, tensor in enumerate(held) if tensor is not None}

    def store(self) -> None:
        """Write the buffers to the tensors that it was given, which are as long as they can get."""
        for (field, name), held in zip(self._buffers(), self.lent.values(), strict=True):
            new = getattr(self.own, field)[name]
            if new is not None:
                held[:, : new.shape[1]] = new

    def rows(self) -> Tensor:
        """Return a row of each new token [1, 1, n, c + d + d]: index key and entry, if it ends one, and its own key."""
        main, *index = self.new.values()
        entries = torch.cat((*index, main), -1)
        (_, _, n, d), width = self.kv.shape, entries.shape[-1]
        rows = self.kv.new_zeros(1, 1, n, width + d)
        rows[..., width:] = self.kv
        rows[:, 0, (-1 - self.first) % self.rate :: self.rate, :width] = entries
        return rows

    def _buffers(self) -> list[tuple[str, str]]:
        """List the fields and names of the buffers."""
        kinds = getattr(self.own, _ENTRIES).keys()
        return [
            (field, name)
            for field, named in vars(self.own).items()
            if isinstance(named, dict) and field not in (_ENTRIES, _COUNTS)
            for name in named
            if named.keys() == kinds
        ]
