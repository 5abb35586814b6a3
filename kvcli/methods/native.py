"""Native: tokens that the model itself selects, with KV in host memory (DeepSeek Sparse Attention, arXiv 2512.02556).

Some models are trained with an index of their own. Each layer scores all tokens by a small key of every token, and
attends to the best (section 2.1). So nothing is guessed or corrected here: the keys of the index stay on the device,
keys and values or latents lie in host memory, a step recalls what the layer has selected, and attention is exact.

Decided here: neighbouring steps select much the same tokens. So the device holds the tokens that were selected last,
`slots` of them; the least recently selected one makes room. New tokens are among them from the start. In the counters
one token of one KV head is a page of size 1. A layer that selects nothing attends to everything, on the device. Where
a layer selects entries that each stand for several tokens (DeepSeek-V4), these take the place of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.page_table import EMPTY
from kvcli.kernels.selected_attention import selected_attention
from kvcli.kernels.softmax import Softmax
from kvcli.kv.cache import DenseCache, LayerCache, Tiers, both
from kvcli.kv.entries import EntryLayerCache
from kvcli.kv.selected import SelectingCache, selection_traffic, with_new_keys
from kvcli.memory.host_pool import HostPagePool, page_pool
from kvcli.memory.state import Settled
from kvcli.memory.tiers import Footprint, Traffic, nbytes
from kvcli.methods.config import MethodConfig, setting
from kvcli.methods.contract import Method
from kvcli.models.geometry import LayerGeometry
from kvcli.telemetry.counters import Count


class RecalledCache(SelectingCache):
    """Tokens in host memory; on the device their index keys, and kv [t, Hk, slots, d] of those selected last.

    `keys` [t, Hk, capacity, c] are the index keys, cut as `kvcli.kv.selected` says. KV heads select together, or each
    on its own. For each that does, `slot_of` [heads, capacity] is the slot of every token, and `token_in` [heads,
    slots] the token in every slot, EMPTY for none. `used` [heads, slots] is the last step that selected it, by the
    `clock`.
    """

    pool: HostPagePool

    def __init__(self, layer: LayerGeometry, capacity: int, slots: int, tiers: Tiers):
        assert layer.selects is not None
        self.layer, self.length = layer, 0
        self.taken = 0  # tokens stored of an unfinished prompt
        heads, width, parts = layer.num_kv_heads, layer.index_channels, tiers.parts
        self.slots = min(capacity, max(slots, layer.selects.tokens + 1))
        self.keys = tiers.on_device(parts, heads, capacity, width)
        self.pool = page_pool(heads, layer.head_dim - width, 1, capacity, tiers)
        self.kv = tiers.on_device(parts, heads, self.slots, layer.head_dim - width)
        lists = [(layer.selects.heads, size) for size in (capacity, self.slots, self.slots)]
        self.slot_of, self.token_in, self.used = (
            tiers.on_device(*shape, dtype=torch.int64).fill_(EMPTY) for shape in lists
        )
        self.clock = 0

    @override
    def index(self, new: Tensor) -> Tensor:
        return with_new_keys(self.keys, self.length, new, self.layer)

    @override
    def share(self, other: LayerCache, tokens: int) -> None:
        assert isinstance(other, RecalledCache)
        self.pool.share(other.pool, tokens)

    @override
    def take(self, k: Tensor, v: Tensor) -> int:
        first, self.taken = self.taken, k.shape[1]
        return self._write(first, k[:, first:], v[:, first:])

    @override
    def load(self, k: Tensor, v: Tensor) -> int:
        written, width = self.take(k, v), self.layer.index_channels
        self.length, self.taken = k.shape[1], 0
        for rows, x in zip(self.keys, (k, v), strict=False):
            rows[:, : self.length] = x[..., :width]
        first = max(0, self.length - self.slots)
        slots = torch.arange(self.length - first, device=k.device)
        for head in range(len(self.used)):
            self._put(head, slots, slots + first)
        self.used[:, slots], self.clock = slots + first, self.length  # older ones leave earlier
        for rows, x in zip(self.kv, (k, v), strict=False):
            rows[:, : len(slots)] = x[:, first:, width:]
        return written

    @override
    def append(self, k: Tensor, v: Tensor) -> int:
        width, at = self.layer.index_channels, self.length
        for head in range(len(self.used)):
            slot = self._oldest(head, 1)
            self._put(head, slot, slot.new_tensor([at]))
            its = self._heads(head)
            for rows, x in zip(self.kv, (k, v), strict=False):
                rows[its, slot[0]] = x[its, width:]
        for keys, x in zip(self.keys, (k, v), strict=False):
            keys[:, at] = x[:, :width]
        self.length += 1
        return self._write(at, k[:, None], v[:, None])

    @override
    def rewind(self, length: int) -> None:
        self.length = length
        gone = self.token_in >= length
        self.slot_of[:, length:] = self.token_in[gone] = self.used[gone] = EMPTY

    def recall(self, selected: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """Bring `selected` [heads, k], each token once, to the device; EMPTY is none.

        Returns their slots [heads, k], and for each KV head how many were selected and how many of them were missing.
        """
        self.clock += 1
        slots, wanted, missed = torch.full_like(selected, EMPTY), list[int](), list[int]()
        for head, all_tokens in enumerate(selected):
            there = all_tokens != EMPTY
            tokens = all_tokens[there]
            found = self.slot_of[head, tokens]
            here = found != EMPTY
            self.used[head, found[here]] = self.clock
            missing, its = tokens[~here], self._heads(head)
            if len(missing):
                found[~here] = free = self._oldest(head, len(missing))
                self._put(head, free, missing)
                pages, heads = missing.repeat(len(its)), its.repeat_interleave(len(missing))
                self.pool.bring(pages, heads, self.kv[:, :, :, None], free.repeat(len(its)))
            slots[head, there] = found
            wanted += [len(tokens)] * len(its)
            missed += [len(missing)] * len(its)
        return slots, wanted, missed

    def attend_recalled(self, q: Tensor, slots: Tensor, softmax: Softmax) -> Tensor:
        """Attend with q [H, d] to the tokens in `slots` [heads, k]; return [H, d]."""
        return selected_attention(q[:, None], *both(self.kv), softmax._replace(selected=slots[:, None]))[:, 0]

    @override
    def attend(self, q: Tensor, softmax: Softmax) -> Tensor:
        assert softmax.selected is not None
        slots, _, _ = self.recall(softmax.selected[:, 0])
        return self.attend_recalled(q, slots, softmax)

    @override
    def waiting(self) -> Sequence[Tensor]:
        return self.keys, self.kv

    def settled(self) -> list[Settled]:
        """Return the index keys, which do not change."""
        return [Settled(self.keys, 2, self.length)] if self.keys.numel() else []

    @override
    def footprint(self) -> Footprint:
        device = nbytes(self.keys, self.kv, self.slot_of, self.token_in, self.used)
        return Footprint(device) + self.pool.footprint()

    @override
    def traffic(self, length: int) -> Traffic:
        assert self.layer.selects is not None
        moved = selection_traffic(self.layer, length, self.keys.element_size())
        recalled = 0 if length <= self.slots else self.layer.selects.tokens * self.pool.page_bytes
        return Traffic(moved.attended, moved.scored, recalled=recalled)

    def _write(self, first: int, k: Tensor, v: Tensor) -> int:
        """Write tokens k, v [Hk, n, c + d] from token `first` on to the host; return the bytes."""
        return self.pool.write(first, *(x[:, :, None, self.layer.index_channels :] for x in (k, v)))

    def _heads(self, head: int) -> Tensor:
        """Return the KV heads that a selecting head serves."""
        every = torch.arange(self.layer.num_kv_heads, device=self.kv.device)
        return every if len(self.used) == 1 else every[head : head + 1]

    def _oldest(self, head: int, count: int) -> Tensor:
        """Return the slots [count] that were selected least recently."""
        return self.used[head].topk(count, largest=False).indices

    def _put(self, head: int, slots: Tensor, tokens: Tensor) -> None:
        """Note that `slots` hold `tokens`, both [n], instead of what they held."""
        before = self.token_in[head, slots]
        self.slot_of[head, before[before != EMPTY]] = EMPTY
        self.token_in[head, slots], self.slot_of[head, tokens], self.used[head, slots] = tokens, slots, self.clock


Kept: TypeAlias = RecalledCache | DenseCache


class NativeConfig(MethodConfig):
    """Settings of native selection; what is selected is the model's."""

    slots: int = setting(8192, "tokens of a layer on the device, at least those that a step selects", "tokens", ge=1)

    @property
    @override
    def on_host(self) -> bool:
        return True


class Native(Method[NativeConfig, Any]):
    """Attends to what the model selects by itself."""

    Config = NativeConfig
    title = "tokens that the model itself selects"
    paper = "arXiv 2512.02556"
    long_generation = True
    offloads = True
    group_consistent = True
    device_memory = "O(L)"
    takes_selection = True
    blocking = True

    def new_cache(self, layer: LayerGeometry) -> Kept | EntryLayerCache[Kept]:
        """Make a cache in host memory for a layer that selects, and one on the device for any other."""
        capacity, tiers = self.context.capacity, self.context.tiers

        def kept(layer: LayerGeometry, capacity: int) -> Kept:
            if layer.selects is None:
                return DenseCache(layer.num_kv_heads, layer.head_dim, capacity, tiers)
            return RecalledCache(layer, capacity, self.config.slots, tiers)

        return EntryLayerCache(layer, capacity, tiers, kept) if layer.near else kept(layer, capacity)

    @override
    def retrieve(self, layer: int, cache: Kept | EntryLayerCache[Kept], q: Tensor, softmax: Softmax) -> Tensor:
        """Recall what the model has selected, and attend to it."""
        kept = cache.entries if isinstance(cache, EntryLayerCache) else cache
        if isinstance(cache, DenseCache) or isinstance(kept, DenseCache):
            with self.span("attention", layer):
                return cache.attend(q, softmax)
        assert softmax.selected is not None
        with self.span("recall", layer):
            cache.selected = softmax.selected[:, 0]
            slots, wanted, missed = kept.recall(cache.selected)
        self.count_heads(layer, Count.PAGES_REQUESTED, wanted)
        self.count_recalled(layer, missed, sum(missed) * kept.pool.block_bytes)
        with self.span("attention", layer):
            return cache.attend_recalled(q, slots, softmax)
