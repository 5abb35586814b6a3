"""Native: tokens that the model itself selects, with KV in host memory (DeepSeek Sparse Attention, arXiv 2512.02556).

Some models are trained with an index of their own. Each layer scores all tokens by a small key of every token, and
attends to the best (section 2.1). So nothing is guessed or corrected here: the keys of the index stay on the device,
keys and values or latents lie in host memory, a step recalls what the layer has selected, and attention is exact.

Decided here: neighbouring steps select much the same tokens. So the device holds the tokens that were selected last,
`slots` of them; the least recently selected one makes room. New tokens are among them from the start. While the others
come over the bus or from a disk, a step attends to those that are there, and then merges both parts. In the counters
one token of one KV head is a page of size 1. A layer that selects nothing attends to everything, on the device. Where
a layer selects entries that each stand for several tokens (DeepSeek-V4), these take the place of tokens.

Keys of the index are kept as transformers' modules make and score them, in the model's dtype. None of them makes keys
of 8 bits, as the kernels of published models do, and rounded ones would select other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.block_attention import add_sinks, merge_blocks
from kvcli.kernels.page_table import EMPTY
from kvcli.kernels.selected_attention import part_of_selection, selected_attention
from kvcli.kernels.softmax import Softmax
from kvcli.kv.cache import DenseCache, LayerCache, Tiers, both
from kvcli.kv.entries import EntryLayerCache
from kvcli.kv.selected import SelectingCache, selection_traffic
from kvcli.memory.host_pool import DiskPagePool, HostPagePool, page_pool
from kvcli.memory.state import Settled
from kvcli.memory.tiers import Footprint, Traffic, nbytes
from kvcli.methods.config import HostKVConfig, setting
from kvcli.methods.contract import Method
from kvcli.models.geometry import LayerGeometry
from kvcli.telemetry.counters import Count


class Lookup(NamedTuple):
    """The `slots` [heads, k] of a step's selection, EMPTY for none; tokens that are `missing`, bool, have yet to come.

    These come as blocks `pages` [m] of KV heads `heads` to slots `into` of them. For each KV head, so many tokens were
    `wanted`, and so many of them `missed`.
    """

    slots: Tensor
    missing: Tensor
    pages: Tensor
    heads: Tensor
    into: Tensor
    wanted: list[int]
    missed: list[int]


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

    @property
    @override
    def index_rows(self) -> Tensor:
        return self.keys

    @property
    @override
    def first_part(self) -> int:
        return self.pool.first_part

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

    def look_up(self, selected: Tensor) -> Lookup:
        """Look up `selected` [heads, k], each token once, EMPTY for none; `bring` has to follow.

        Missing tokens have slots from now on, those of the least recently selected tokens. A disk begins to read them.
        """
        self.clock += 1
        slots, away = torch.full_like(selected, EMPTY), torch.zeros_like(selected, dtype=torch.bool)
        blocks, wanted, missed = [], list[int](), list[int]()
        for head, all_tokens in enumerate(selected):
            there = all_tokens != EMPTY
            tokens = all_tokens[there]
            found = self.slot_of[head, tokens]
            absent = found == EMPTY
            self.used[head, found[~absent]] = self.clock
            missing, its = tokens[absent], self._heads(head)
            found[absent] = free = self._oldest(head, len(missing))
            self._put(head, free, missing)
            blocks.append((missing.repeat(len(its)), its.repeat_interleave(len(missing)), free.repeat(len(its))))
            slots[head, there], away[head, there] = found, absent
            wanted += [len(tokens)] * len(its)
            missed += [len(missing)] * len(its)
        pages, heads, into = (torch.cat(parts) for parts in zip(*blocks, strict=True))
        if len(pages) and isinstance(self.pool, DiskPagePool):
            self.pool.announce(pages, heads)
        return Lookup(slots, away, pages, heads, into, wanted, missed)

    def bring(self, found: Lookup) -> None:
        """Bring the missing tokens to their slots."""
        if len(found.pages):
            self.pool.bring(found.pages, found.heads, self.kv[:, :, :, None], found.into)

    @property
    def comes_beside(self) -> bool:
        """Whether missing tokens can come while others are attended to."""
        return not self.pool.tiers.one_memory or self.pool.on_disk is not None

    def attend_part(self, q: Tensor, slots: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor]:
        """Attend with q [H, d] to the tokens in `slots` [heads, k], a part of the selection -> out [H, d], lse [H]."""
        return part_of_selection(q, *both(self.kv), slots, softmax)

    def attend_slots(self, q: Tensor, slots: Tensor, softmax: Softmax) -> Tensor:
        """Attend with q [H, d] to the tokens in `slots` [heads, k]; return [H, d]."""
        return selected_attention(q[:, None], *both(self.kv), softmax._replace(selected=slots[:, None]))[:, 0]

    @override
    def attend(self, q: Tensor, softmax: Softmax) -> Tensor:
        assert softmax.selected is not None
        found = self.look_up(softmax.selected[:, 0])
        self.bring(found)
        return self.attend_slots(q, found.slots, softmax)

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


class NativeConfig(HostKVConfig):
    """Settings of native selection; what is selected is the model's."""

    slots: int = setting(8192, "tokens of a layer on the device, at least those that a step selects", "tokens", ge=1)


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

    def new_cache(self, layer: LayerGeometry) -> Kept | EntryLayerCache[Kept]:
        """Make a cache in host memory for a layer that selects, and one on the device for any other."""
        capacity, tiers = self.context.capacity, self.context.tiers

        def kept(layer: LayerGeometry, capacity: int) -> Kept:
            if layer.selects is None:
                return DenseCache(layer.num_kv_heads, layer.head_dim, capacity, tiers)
            return RecalledCache(layer, capacity, self.config.slots, self.config.tiers(tiers))

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
            found = kept.look_up(cache.selected)
        self.count_heads(layer, Count.PAGES_REQUESTED, found.wanted)
        self.count_recalled(layer, found.missed, sum(found.missed) * kept.pool.block_bytes)
        if cache is not kept or not kept.comes_beside or not 0 < sum(found.missed) < sum(found.wanted):
            with self.span("recall", layer):
                kept.bring(found)
            with self.span("attention", layer):
                return cache.attend_slots(q, found.slots, softmax)
        with self.span("attention", layer):
            here = cache.attend_part(q, found.slots.masked_fill(found.missing, EMPTY), softmax)
        with self.span("recall", layer):
            cache.bring(found)
        with self.span("attention", layer):
            came = cache.attend_part(q, found.slots.masked_fill(~found.missing, EMPTY), softmax)
            out, lse = merge_blocks(here, came)
            return (out if softmax.sinks is None else add_sinks(out, lse, softmax.sinks)).to(q.dtype)
