"""The last tokens of a layer, and entries that each stand for several tokens (DeepSeek-V4).

On its way to the cache a token has a row: the entry that ends with it and the entry's index key, or zeros, and then its
own key, which is also its value. So prompts are collected, saved and shared like any others. The cache keeps the own
keys of the last tokens, and the entries without gaps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.decode_attention import decode_attention
from kvcli.kernels.page_table import EMPTY
from kvcli.kernels.selected_attention import selected_attention
from kvcli.kernels.softmax import Softmax
from kvcli.kv.cache import DenseCache, LayerCache, Tiers
from kvcli.kv.selected import SelectingCache, with_new_keys
from kvcli.kv.sliding import SlidingCache
from kvcli.memory.host_pool import HostPagePool
from kvcli.memory.tiers import Footprint, Traffic
from kvcli.models.geometry import LayerGeometry


def ended(rows: Tensor, layer: LayerGeometry) -> Tensor:
    """Return the entries [.., e, c + d] that end within a sequence's rows [.., n, c + d + d]; a view."""
    return rows[..., layer.rate - 1 :: layer.rate, : layer.index_channels]


def with_new_entries(rows: Tensor, length: int, new: Tensor, layer: LayerGeometry) -> Tensor:
    """Write the index keys of `new` entries [e, c] to rows [1, 1, L, ..] of `length` tokens; return those of all."""
    return with_new_keys(ended(rows, layer), length // layer.rate, new, layer.of_entries)


def attend_to_entries(q: Tensor, rows: Tensor, softmax: Softmax, layer: LayerGeometry) -> Tensor:
    """Attend with the newest queries q [H, m, d] to rows [1, n, c + d + d]; return [H, m, d].

    Each query sees the last tokens up to its own, and the entries that are selected, [1, m, k].
    """
    assert softmax.selected is not None
    (_, m, d), n, window = q.shape, rows.shape[1], layer.near
    first = max(0, n - m - window + 1)
    near, entries = rows[:, first:, -d:], ended(rows, layer)[..., -d:]
    keys = torch.cat((near, entries), 1)
    last = torch.arange(n - m, n, device=q.device)[:, None]
    tokens = last + torch.arange(1 - window, 1, device=q.device)  # [m, window]
    chosen = softmax.selected
    both = torch.where(tokens < 0, EMPTY, tokens - first), torch.where(chosen < 0, EMPTY, chosen + near.shape[1])
    selected = torch.cat((both[0].expand(len(chosen), -1, -1), both[1]), -1)
    return selected_attention(q, keys, keys, softmax._replace(selected=selected))


CacheT = TypeVar("CacheT", bound=DenseCache | SelectingCache)


class EntryLayerCache(SelectingCache, Generic[CacheT]):
    """The last tokens on the device, in `near`, and the `entries` in a cache to which each of them is a token.

    `make` makes that cache for a layer, with room for so many tokens.
    """

    def __init__(self, layer: LayerGeometry, capacity: int, tiers: Tiers, make: Callable[[LayerGeometry, int], CacheT]):
        self.layer, self.length = layer, 0
        self.entries = make(layer.of_entries, max(1, capacity // layer.rate))
        self.d = layer.head_dim - layer.index_channels
        self.near = SlidingCache(1, self.d, min(layer.near, capacity), tiers)

    @property
    @override
    def pool(self) -> HostPagePool | None:  # type: ignore[override]
        return self.entries.pool

    @property
    @override
    def index_rows(self) -> Tensor:
        assert isinstance(self.entries, SelectingCache)
        return self.entries.index_rows

    @override
    def index(self, new: Tensor) -> Tensor:
        assert isinstance(self.entries, SelectingCache)
        return self.entries.index(new)

    @override
    def take(self, k: Tensor, v: Tensor) -> int:
        made = ended(k, self.layer)
        return self.entries.take(made, made) if made.shape[1] else 0

    @override
    def load(self, k: Tensor, v: Tensor) -> int:
        self.length, own = k.shape[1], k[..., -self.d :]
        self.near.load(own, own)
        made = ended(k, self.layer)
        return self.entries.load(made, made) if made.shape[1] else 0

    @override
    def append(self, k: Tensor, v: Tensor) -> int:
        self.near.append(k[:, -self.d :], k[:, -self.d :])
        self.length += 1
        made = k[:, : -self.d]
        return 0 if self.length % self.layer.rate else self.entries.append(made, made)

    @override
    def rewind(self, length: int) -> None:
        self.length = length
        self.near.rewind(length)
        self.entries.rewind(length // self.layer.rate)

    @override
    def share(self, other: LayerCache, tokens: int) -> None:
        assert isinstance(other, EntryLayerCache)
        self.entries.share(other.entries, tokens // self.layer.rate)

    @override
    def attend(self, q: Tensor, softmax: Softmax) -> Tensor:
        assert softmax.selected is not None
        self.selected = softmax.selected[:, 0]
        return self.attend_slots(q, self.selected, softmax)

    def attend_slots(self, q: Tensor, slots: Tensor, softmax: Softmax) -> Tensor:
        """Attend with q [H, d] to the last tokens, and the entries in `slots` [1, k] of their cache; return [H, d]."""
        chosen = self.entries.kv[0, :, slots[0][slots[0] != EMPTY], -self.d :]
        keys = torch.cat((self.near.resident()[0], chosen), 1)
        return decode_attention(q, keys, keys, softmax._replace(selected=None))

    @override
    def attended(self) -> Tensor:
        rate, mask = self.layer.rate, torch.zeros(1, self.length, dtype=torch.bool)
        mask[:, self.near.dropped :] = True
        if self.selected is not None:
            entries = self.selected[0][self.selected[0] != EMPTY].cpu()
            mask[:, (rate * entries[:, None] + torch.arange(rate)).flatten()] = True
        return mask

    @override
    def footprint(self) -> Footprint:
        return self.near.footprint() + self.entries.footprint()

    @override
    def traffic(self, length: int) -> Traffic:
        moved = self.entries.traffic(length // self.layer.rate)
        return replace(moved, attended=moved.attended + self.near.traffic(length).attended)
