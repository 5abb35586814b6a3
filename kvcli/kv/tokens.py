"""Caches whose tokens are selected one by one, by an index of their keys on the device.

Tokens are indexed a full group at a time; a group may be a single token. The newest tokens, including the unfilled
group, are always attended to, so that every token is either indexed or attended to. The KV is on the device
(`ResidentTokenCache`), or in host memory with the selected tokens on the device (`OffloadedTokenCache`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from kvcli.kernels import page_table
from kvcli.kernels.decode_attention import attend_chosen, attend_chosen_suits, decode_attention
from kvcli.kernels.group_pooling import HeadPooling, pool_queries, pool_scores
from kvcli.kernels.narrow_attention import ChainTokens
from kvcli.kernels.page_table import EMPTY, Misses, SlotLayout, distinct
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.token_scores import token_scores
from kvcli.kv.cache import DenseCache, LayerCache, LayerSlots, Tiers, both, token_mask
from kvcli.kv.pages import kv_heads, take
from kvcli.kv.sliding import SlidingCache
from kvcli.memory.host_pool import DiskPagePool, HostPagePool, page_pool
from kvcli.memory.state import Settled
from kvcli.memory.tiers import Footprint, Traffic, nbytes
from kvcli.sizes import slices


@dataclass(frozen=True)
class TokenBudget:
    """A budget of `total` tokens: `sink` first, at least `window` (>= 1) recent, the rest selected.

    The recent tokens are the last `window` or those that do not fill a group of `group`, whichever are more. As their
    number varies with the length, the number of selected tokens makes up for it: the sum is always `total`.
    """

    total: int
    sink: int
    window: int
    group: int

    @property
    def max_selected(self) -> int:
        """Tokens selected when a group has just filled."""
        return self.total - self.sink - self.window

    @property
    def min_selected(self) -> int:
        """Tokens selected just before a group fills."""
        return self.total - self.sink - max(self.window, self.group - 1)

    def full(self, length: int) -> int:
        """Return the number of tokens in full groups."""
        return length // self.group * self.group

    def candidates(self, length: int) -> range:
        """Return the tokens that can be selected, neither sink nor recent; none in a short context."""
        sink = min(self.sink, length)
        return range(sink, max(sink, min(length - self.window, self.full(length))))

    @property
    def slots(self) -> SlotLayout:
        """The layout in slots of the tokens attended to."""
        return SlotLayout(1, self.sink, self.max_selected, self.window, self.group)

    def active(self, length: int) -> bool:
        """Return whether something has to be left out at this length."""
        return length > self.total

    def selected(self, length: int) -> int:
        """Return how many tokens to select in a context that has outgrown the budget."""
        candidates = self.candidates(length)
        return self.total - candidates.start - (length - candidates.stop)


class TokenIndex(Protocol):
    """An index on the device by which tokens are scored. Each has its own `scores` for the methods that use it."""

    def fill(self, first: int, keys: Tensor) -> None:
        """Index whole groups of consecutive tokens from token `first` on: keys [Hk, n, d]."""

    def traffic(self, budget: TokenBudget, length: int) -> Traffic:
        """Estimate what a selection moves once `length` tokens were seen."""

    def nbytes(self) -> int:
        """Count the bytes on the device."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a batch of such indexes stacks, by name."""

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Hold these tensors, equal to those of `tensors`, instead of them."""


IndexT = TypeVar("IndexT", bound=TokenIndex)


class TokenCache(LayerCache, Generic[IndexT]):
    """Shared part of resident and offloaded tokens: the candidates, and attention to selected tokens."""

    budget: TokenBudget
    index: IndexT
    k: Tensor
    v: Tensor
    chosen: Tensor | None = None
    """Tokens last attended to besides sink and recent ones: [Hk, k], or [H, k] by query head; None for all."""
    token_on_host = 0
    """Bytes of a token in host memory, for all KV heads."""

    @property
    def active(self) -> bool:
        """Whether the context has outgrown the budget."""
        return self.budget.active(self.length)

    @property
    def candidates(self) -> range:
        """Tokens that can be selected."""
        return self.budget.candidates(self.length)

    @property
    def selected(self) -> int:
        """Number of tokens to select, once the context has outgrown the budget."""
        return self.budget.selected(self.length)

    @override
    def traffic(self, length: int) -> Traffic:
        token = nbytes(*(rows[:, :1] for rows in distinct(self.k, self.v)))
        if not self.budget.active(length):
            return Traffic(attended=length * token)
        recalled = self.budget.selected(length) * self.token_on_host
        moved = self.index.traffic(self.budget, length)
        attended = min(length, self.readers * self.budget.total) * token  # the most
        return replace(moved, attended=attended, recalled=recalled, scores=self.readers * moved.scores)

    @abstractmethod
    def recall(self, selected: Tensor) -> tuple[list[int], int]:
        """Bring the missing tokens of `selected` [Hk, k] to the device, in place of those no longer selected.

        Returns the misses of each KV head and the bytes moved.
        """

    def _attend_rows(self, q: Tensor, chosen: Tensor, recent: Tensor | slice, softmax: Softmax) -> Tensor:
        """Attend to the rows of the sinks, to rows `chosen` of each KV head or query head, and to rows `recent`."""
        numbers = torch.arange(self.k.shape[1], device=chosen.device)
        before, after = (numbers[part].expand(len(chosen), -1) for part in (slice(self.candidates.start), recent))
        rows = torch.cat((before, chosen, after), 1)
        if attend_chosen_suits(q, self.k, self.v, rows):
            return attend_chosen(q, self.k, self.v, rows, softmax)
        return decode_attention(q, take(self.k, rows), take(self.v, rows), softmax)

    @abstractmethod
    def attend_selected(self, q: Tensor, selected: Tensor, softmax: Softmax) -> Tensor:
        """Attend with q [H, d] to sink, recent and `selected` [Hk, k] tokens, after `recall`; return [H, d]."""

    @override
    def attended(self) -> Tensor:
        candidates = self.candidates
        if self.chosen is None:
            return token_mask(self.k, self.length, range(self.length))
        always = token_mask(self.k, self.length, range(candidates.start), range(candidates.stop, self.length))
        always[kv_heads(self.chosen, len(always))[:, None], self.chosen] = True
        return always


class ResidentTokenCache(TokenCache[IndexT], DenseCache):
    """Keys and values k, v [Hk, capacity, d] of every token on the device, and the index."""

    lends = True

    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
        capacity: int,
        budget: TokenBudget,
        index: IndexT,
        tiers: Tiers,
        readers: int = 1,
    ):
        super().__init__(num_kv_heads, head_dim, capacity, tiers)
        self.budget = budget
        self.index = index
        self.readers = readers

    @override
    def load(self, k: Tensor, v: Tensor) -> int:
        super().load(k, v)
        self.index.fill(0, k[:, : self.budget.full(self.length)])
        return 0

    @override
    def tokens_in_chain(self) -> ChainTokens | None:
        return None if self.budget.active(self.length + 1) else super().tokens_in_chain()

    @override
    def take_row(self) -> int:
        super().take_row()
        first = self.length - self.budget.group
        if self.length % self.budget.group == 0:
            self.index.fill(first, self.k[:, first : self.length])
        return 0

    @override
    def recall(self, selected: Tensor) -> tuple[list[int], int]:
        """Return no misses."""
        return [0] * len(self.k), 0

    @override
    def attend_selected(self, q: Tensor, selected: Tensor, softmax: Softmax) -> Tensor:
        self.chosen = selected
        return self._attend_rows(q, selected, slice(self.candidates.stop, self.length), softmax)

    @override
    def as_slots(self) -> LayerSlots:
        return LayerSlots(self.kv, self.budget.slots, self.index.tensors(), in_place=True)

    @override
    def adopt_slots(self, slots: LayerSlots) -> None:
        super().adopt_slots(slots)
        self.index.adopt(slots.tensors)

    @override
    def footprint(self) -> Footprint:
        return super().footprint() + Footprint(device=self.index.nbytes())


# Tokens whose keys are put in other coordinates at once; bounds the fp32 copies.
PIECE = 4096


class KeysInPlace(TokenIndex):
    """Scores tokens by keys that the cache holds anyway, and needs no memory of its own."""

    @override
    def fill(self, first: int, keys: Tensor) -> None:
        """Do nothing: the cache has stored the keys."""

    @override
    def tensors(self) -> dict[str, Tensor]:
        """Return nothing: the keys are the cache's."""
        return {}

    @override
    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Do nothing: the cache sets its keys."""

    @override
    def nbytes(self) -> int:
        """Return 0: the cache counts the keys."""
        return 0


class KeyChannelIndex(KeysInPlace):
    """Scores tokens by the first `channels` of a cache's `keys` [Hk, capacity, d]."""

    keys: Tensor

    def __init__(self, channels: int):
        self.channels = channels

    def scores(self, q: Tensor, tokens: range, scale: float) -> Tensor:
        """Score consecutive tokens with q [H, d] for every query head; return [Hk, G, len(tokens)] in fp32."""
        if self.keys.device.type != "cpu":
            return token_scores(q, self._of(tokens), scale)
        # The BLAS reads whole rows up to three times as fast as the first half of each.
        query = pad(q[:, : self.channels], (0, max(0, self.keys.shape[2] - self.channels)))
        return token_scores(query, self.keys[:, tokens.start : tokens.stop], scale)

    @override
    def traffic(self, budget: TokenBudget, length: int) -> Traffic:
        candidates = budget.candidates(length)
        return Traffic(scored=nbytes(self._of(candidates)), scores=4 * self.keys.shape[0] * len(candidates))

    def _of(self, tokens: range) -> Tensor:
        return self.keys[:, tokens.start : tokens.stop, : self.channels]


class ChannelScoredCache(ResidentTokenCache[KeyChannelIndex]):
    """A resident cache, k, v [Hk, capacity, d], whose tokens are scored by the first `channels` of their keys."""

    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
        capacity: int,
        budget: TokenBudget,
        channels: int,
        tiers: Tiers,
        readers: int = 1,
    ):
        super().__init__(num_kv_heads, head_dim, capacity, budget, KeyChannelIndex(channels), tiers, readers)
        self.index.keys = self.k

    @override
    def adopt_slots(self, slots: LayerSlots) -> None:
        super().adopt_slots(slots)
        self.index.keys = self.k


class PrincipalAxesCache(ChannelScoredCache):
    """A channel-scored cache with keys in the coordinates of `axes` [Hk, d, d]; the method sets these first.

    The axes are orthonormal, so scores and attention do not change if the query is in these coordinates as well.
    """

    def __init__(
        self, num_kv_heads: int, head_dim: int, capacity: int, budget: TokenBudget, channels: int, tiers: Tiers
    ):
        super().__init__(num_kv_heads, head_dim, capacity, budget, channels, tiers)
        self.axes = tiers.on_device(num_kv_heads, head_dim, head_dim, dtype=torch.float32)

    @override
    def load(self, k: Tensor, v: Tensor) -> int:
        written = super().load(k, v)
        for part in slices(k.shape[1], PIECE):
            self.k[:, part] = k[:, part].float() @ self.axes
        return written

    @override
    def append(self, k: Tensor, v: Tensor) -> int:
        return super().append(self.to_axes(k), v)

    @override
    def as_slots(self) -> LayerSlots:
        slots = super().as_slots()
        return slots._replace(tensors={**slots.tensors, "axes": self.axes})

    def to_axes(self, x: Tensor) -> Tensor:
        """Rotate queries [H, d] or keys [Hk, d] of one token to the axes of their KV head; the dtype stays."""
        heads = x.float().view(self.axes.shape[0], -1, x.shape[-1]) @ self.axes
        return heads.view_as(x).to(x.dtype)

    @override
    def footprint(self) -> Footprint:
        return super().footprint() + Footprint(device=nbytes(self.axes))


class PartialKeyIndex(TokenIndex):
    """Scores tokens by a few columns of their keys: `keys` [Hk, capacity, c], the full keys times `basis` [Hk, d, c].

    Both are on the device. The method sets the basis before the first token is stored.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, columns: int, capacity: int, tiers: Tiers):
        self.basis = tiers.on_device(num_kv_heads, head_dim, columns, dtype=torch.float32)
        self.keys = tiers.on_device(num_kv_heads, capacity, columns)
        self.filled = 0  # tokens

    @override
    def fill(self, first: int, keys: Tensor) -> None:
        self.filled = first + keys.shape[1]
        for part in slices(keys.shape[1], PIECE):
            self.keys[:, first:][:, part] = keys[:, part].float() @ self.basis

    @override
    def tensors(self) -> dict[str, Tensor]:
        return {"basis": self.basis, "keys": self.keys}

    @override
    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        self.basis, self.keys = tensors["basis"], tensors["keys"]

    def scores(self, q: Tensor, tokens: range, scale: float, pooling: HeadPooling) -> Tensor:
        """Score consecutive tokens with q [H, d]: [Hk, len(tokens)] in fp32, or [H, ..] without pooling."""
        heads = q.float().view(self.keys.shape[0], -1, q.shape[-1]) @ self.basis  # [Hk, G, c]
        queries = pool_queries(heads, pooling).flatten(0, 1)
        return pool_scores(token_scores(queries, self.keys[:, tokens.start : tokens.stop], scale), pooling)

    @override
    def traffic(self, budget: TokenBudget, length: int) -> Traffic:
        candidates = budget.candidates(length)
        scored = nbytes(self.keys[:, candidates.start : candidates.stop])
        return Traffic(scored=scored, scores=4 * self.keys.shape[0] * len(candidates))

    def settled(self) -> list[Settled]:
        """Return the keys, which do not change."""
        return [Settled(self.keys, 1, self.filled)]

    @override
    def nbytes(self) -> int:
        return nbytes(self.basis, self.keys)


class TokensOnHost(LayerCache):
    """All KV in host memory, `pool`, in pages of one token; sinks and `recent` tokens on the device as well, `near`.

    `chosen` [Hk, m] are the far tokens that the last step read, padded with EMPTY.
    """

    pool: HostPagePool

    def __init__(self, num_kv_heads: int, head_dim: int, capacity: int, sink: int, recent: int, tiers: Tiers):
        self.length = 0
        self.taken = 0  # tokens stored of an unfinished prompt
        self.near = SlidingCache(num_kv_heads, head_dim, min(recent, capacity), tiers, sink)
        self.pool = page_pool(num_kv_heads, head_dim, 1, capacity, tiers, kept=0 if sink else SINKS)
        self.chosen: Tensor | None = None

    @override
    def share(self, other: LayerCache, tokens: int) -> None:
        assert isinstance(other, type(self))
        self.pool.share(other.pool, tokens)

    @property
    @override
    def first_part(self) -> int:
        return self.pool.first_part

    @override
    def take(self, k: Tensor, v: Tensor) -> int:
        first, self.taken = self.taken, k.shape[1]
        return self.pool.write(first, *(x[:, first:, None] for x in (k, v)))

    @property
    def in_place(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values of all tokens in host memory, [Hk, n, d], if a step can read them there; otherwise None."""
        pool = self.pool
        if not pool.tiers.one_memory or pool.format is not None or pool.on_disk is not None or len(pool.pieces) > 1:
            return None
        return both(pool.pieces[0][:, :, :, 0].movedim(0, 2).transpose(0, 1))  # [n, Hk, t, 1, d] -> [t, Hk, n, d]

    @override
    def attend(self, q: Tensor, softmax: Softmax) -> Tensor:
        """Attend to everything on the device, as long as that is all tokens."""
        return self.near.attend(q, softmax)

    def with_chosen(self, mask: Tensor) -> Tensor:
        """Mark the chosen tokens in mask [Hk, length] bool as well."""
        if self.chosen is not None:
            head, row = (self.chosen != EMPTY).nonzero(as_tuple=True)
            mask[head, self.chosen[head, row]] = True
        return mask


SINKS = 4
"""First tokens that stay in host memory if their pages lie on a disk and the device keeps no sinks."""


class OffloadedTokenCache(TokenCache[IndexT]):
    """Full groups in host memory; the index and k, v [Hk, sink + selected + recent, d] on the device.

    The recent tokens are a ring of `recent` rows, in which a group is complete when it fills. `resident` [Hk, selected]
    is the token in each selected slot, EMPTY for none. Until the context outgrows the budget, the rows before the ring
    hold the first tokens. Tokens selected afterwards are fetched if the host holds them in another form (quantised).
    """

    pool: HostPagePool

    def __init__(
        self, num_kv_heads: int, head_dim: int, capacity: int, budget: TokenBudget, index: IndexT, tiers: Tiers
    ):
        self.length = 0
        self.taken = 0  # tokens stored of an unfinished prompt
        self.budget = budget
        self.index = index
        self.recent = max(budget.window, budget.group)
        kept = 0 if budget.sink else SINKS
        self.pool = page_pool(num_kv_heads, head_dim, 1, capacity, tiers, kept=kept)
        self.token_on_host = self.pool.page_bytes
        self.first_rows = budget.sink + budget.max_selected
        self.kv = tiers.on_device(tiers.parts, num_kv_heads, self.first_rows + self.recent, head_dim)
        self.k, self.v = both(self.kv)
        self.coming: Misses | None = None  # recalled for later: resident, but not in its slots yet
        self.resident = tiers.on_device(num_kv_heads, budget.max_selected, dtype=torch.int64)  # token in each slot
        first = torch.arange(budget.sink, self.first_rows, device=tiers.device)
        self.resident[:] = first if self.pool.format is None else EMPTY

    @override
    def share(self, other: LayerCache, tokens: int) -> None:
        assert isinstance(other, OffloadedTokenCache)
        self.pool.share(other.pool, self.budget.full(tokens))

    @override
    def waiting(self) -> Sequence[Tensor]:
        return self.kv, *self.index.tensors().values()

    @property
    @override
    def first_part(self) -> int:
        return self.pool.first_part

    @override
    def take(self, k: Tensor, v: Tensor) -> int:
        """Write whole groups to the host; they are indexed at the end, because some indexes need all of them."""
        first, self.taken = self.taken, self.budget.full(k.shape[1])
        return self.pool.write(first, *(x[:, first : self.taken, None] for x in (k, v)))

    @override
    def load(self, k: Tensor, v: Tensor) -> int:
        """Store a prompt: full groups on the host, sink and recent tokens on the device, nothing selected yet."""
        self.length = k.shape[1]
        if self.active:
            self.resident.fill_(EMPTY)
        first = self.budget.sink if self.active else self.first_rows
        ring = torch.arange(max(0, self.length - self.recent), self.length, device=k.device)
        for rows, tokens in ((self.k, k), (self.v, v)):
            rows[:, : min(first, self.length)] = tokens[:, :first]
            rows[:, self._ring_rows(ring)] = tokens[:, ring]
        written = self.take(k, v)
        self.index.fill(0, k[:, : self.taken])
        self.taken = 0
        return written

    @override
    def append(self, k: Tensor, v: Tensor) -> int:
        """Store the current token; index a group that it fills, and write it to the host."""
        at = self.length
        for rows, token in ((self.k, k), (self.v, v)):
            rows[:, self.first_rows + at % self.recent] = token
            if at < self.first_rows:
                rows[:, at] = token
        self.length += 1
        group = self.budget.group
        if group == 1:  # nothing to collect from the ring, which would cost time in every layer's step
            return self._offload(at, k[:, None], v[:, None])
        if self.length % group:
            return 0
        rows_of_group = self._ring_rows(torch.arange(self.length - group, self.length, device=k.device))
        return self._offload(self.length - group, self.k[:, rows_of_group], self.v[:, rows_of_group])

    @override
    def recall(self, selected: Tensor, later: bool = False) -> tuple[list[int], int]:
        self._arrive()
        misses = resolve_tokens(self.resident, selected, self.length)
        if later and isinstance(self.pool, DiskPagePool):
            self.pool.announce(misses.pages, misses.heads)
            self.coming = misses
        else:
            self._bring(misses)
        return misses.by_head(len(selected)), len(misses.slots) * self.pool.block_bytes

    @override
    def attend_selected(self, q: Tensor, selected: Tensor, softmax: Softmax) -> Tensor:
        self._arrive()
        self.chosen = selected
        if selected.shape == self.resident.shape and self.length - self.candidates.stop == self.recent:
            return decode_attention(q, self.k, self.v, softmax)  # all rows are attended to
        slots = torch.arange(self.resident.shape[1], device=q.device).expand_as(self.resident)
        if selected.shape != slots.shape:
            slots = slots[self.resident != EMPTY].view_as(selected)
        return self._attend_rows(q, slots + self.budget.sink, self._recent_rows(), softmax)

    @override
    def attend(self, q: Tensor, softmax: Softmax) -> Tensor:
        """Attend with q [H, d] to all tokens of a context that has not outgrown the budget; return [H, d]."""
        candidates = self.candidates
        rows = torch.arange(candidates.start, candidates.stop, device=q.device)
        return self._attend_rows(q, rows.expand(self.k.shape[0], -1), self._recent_rows(), softmax)

    @override
    def footprint(self) -> Footprint:
        device = nbytes(self.kv, self.resident) + self.index.nbytes()
        return Footprint(device) + self.pool.footprint()

    @override
    def as_slots(self) -> LayerSlots:
        """Lay the cache out in slots; write tokens that wait for their group to fill to the host."""
        budget, full = self.budget, self.budget.full(self.length)
        waiting = self._ring_rows(torch.arange(full, self.length, device=self.k.device))
        self.pool.write(full, self.k[:, waiting, None], self.v[:, waiting, None])
        if budget.group == 1:  # over slots the ring starts with token `first_rows`
            self.kv[:, :, self.first_rows :] = self.kv[:, :, self.first_rows :].roll(-self.first_rows, 2)
        tensors = {"resident": self.resident.int(), **self.index.tensors()}
        pool = self.pool
        return LayerSlots(self.kv, budget.slots, tensors, pieces=pool.pieces, format=pool.format, sizes=pool.sizes)

    @override
    def adopt_slots(self, slots: LayerSlots) -> None:
        self.kv, self.resident = slots.kv, slots.tensors["resident"]
        self.k, self.v = both(self.kv)
        self.index.adopt(slots.tensors)

    def _bring(self, misses: Misses) -> None:
        """Fetch tokens into their slots."""
        self.pool.bring(misses.pages, misses.heads, self.kv[:, :, :, None], misses.slots + self.budget.sink)

    def _arrive(self) -> None:
        """Fetch what was recalled for later."""
        coming, self.coming = self.coming, None
        if coming is not None:
            self._bring(coming)

    def _recent_rows(self) -> Tensor:
        return self._ring_rows(torch.arange(self.candidates.stop, self.length, device=self.k.device))

    def _offload(self, first: int, k: Tensor, v: Tensor) -> int:
        """Index whole groups from token `first` on, k, v [Hk, n * g, d], and write them to the host."""
        self.index.fill(first, k)
        return self.pool.write(first, k[:, :, None], v[:, :, None])

    def _ring_rows(self, tokens: Tensor) -> Tensor:
        return self.first_rows + tokens % self.recent


def resolve_tokens(resident: Tensor, selected: Tensor, length: int) -> Misses:
    """Assign the j-th missing token of a head to its j-th free slot, in time linear in the context.

    resident [Hk, S] and selected [Hk, k], k <= S, hold token numbers below `length`; EMPTY in `resident` is an empty
    slot. Slots whose token left the selection become EMPTY unless a missing token takes them. A selection has no
    duplicates. Returns the missing tokens and their slots.
    """
    if page_table.suits(resident, selected, len(resident) * length):
        return page_table.resolve(resident, selected, length)
    leaving = ~_members(selected, length).gather(1, resident + 1)
    missing = ~_members(resident, length).gather(1, selected + 1)
    heads, slots = (leaving & (leaving.cumsum(1) <= missing.sum(1, keepdim=True))).nonzero(as_tuple=True)
    misses = Misses(heads, slots, selected[missing])
    resident[leaving] = EMPTY
    resident[heads, slots] = misses.pages
    return misses


def _members(tokens: Tensor, length: int) -> Tensor:
    """Mark in column t + 1 whether a row of `tokens` [Hk, n] holds token t: bool [Hk, length + 1]."""
    flags = torch.zeros(tokens.shape[0], length + 1, dtype=torch.bool, device=tokens.device)
    flags.scatter_(1, tokens + 1, True)
    flags[:, 0] = False
    return flags
