"""Single tokens selected from host memory: the device holds the selected, the first and the recent ones."""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels import resolve_rows
from kvcli.kernels.decode_attention import decode_attention
from kvcli.kernels.resolve_pages import Misses
from kvcli.kernels.slot_layout import EMPTY
from kvcli.kernels.softmax import Softmax
from kvcli.store.cache import Footprint, LayerCache, Tiers, both, nbytes
from kvcli.store.disk_pool import DiskPagePool, page_pool
from kvcli.store.host_pool import HostPagePool
from kvcli.store.layer_slots import LayerSlots
from kvcli.store.tokens import IndexT, TokenBudget, TokenCache

SINKS = 4
"""First tokens that stay in host memory where their pages lie on a disk and the device keeps no sinks."""


class OffloadedTokenCache(TokenCache[IndexT]):
    """In host memory: the KV of full groups. On the device: the index, and k, v [Hk, sink + selected + recent, d].

    The recent tokens are a ring of `recent` rows, in which a group is whole when it fills. `resident` [Hk, selected] is
    the token in each selected slot, EMPTY in none. As long as the context has not outgrown the budget, the rows before
    the ring hold the first tokens; where the host holds them otherwise (quantised), what is selected then is fetched.
    """

    pool: HostPagePool

    def __init__(
        self, num_kv_heads: int, head_dim: int, capacity: int, budget: TokenBudget, index: IndexT, tiers: Tiers
    ):
        self.length = 0
        self.taken = 0  # tokens of a prompt that is not all there yet
        self.budget = budget
        self.index = index
        self.recent = max(budget.window, budget.group)
        kept = 0 if budget.sink else SINKS
        self.pool = page_pool(num_kv_heads, head_dim, 1, capacity, tiers, kept=kept)
        self.token_on_host = self.pool.page_bytes
        self.first_rows = budget.sink + budget.max_selected
        self.kv = tiers.on_device(tiers.parts, num_kv_heads, self.first_rows + self.recent, head_dim)
        self.k, self.v = both(self.kv)
        self.coming: Misses | None = None  # recalled for later: resident, and not yet in its slots
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
        """Write whole groups to the host; they are indexed when all are there, for some indexes look at all."""
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
        """Store the current token; a group that it fills is indexed and written to the host."""
        at = self.length
        for rows, token in ((self.k, k), (self.v, v)):
            rows[:, self.first_rows + at % self.recent] = token
            if at < self.first_rows:
                rows[:, at] = token
        self.length += 1
        group = self.budget.group
        if group == 1:  # which needs no collecting from the ring, in the middle of every layer's step
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
        """Attend with q [H, d] to all tokens of a context that has not outgrown the budget -> [H, d]."""
        candidates = self.candidates
        rows = torch.arange(candidates.start, candidates.stop, device=q.device)
        return self._attend_rows(q, rows.expand(self.k.shape[0], -1), self._recent_rows(), softmax)

    @override
    def footprint(self) -> Footprint:
        device = nbytes(self.kv, self.resident) + self.index.nbytes()
        return Footprint(device) + self.pool.footprint()

    @override
    def as_slots(self) -> LayerSlots:
        """Lay the cache out in slots; tokens that wait for their group to fill are on the host from then on."""
        budget, full = self.budget, self.budget.full(self.length)
        waiting = self._ring_rows(torch.arange(full, self.length, device=self.k.device))
        self.pool.write(full, self.k[:, waiting, None], self.v[:, waiting, None])
        if budget.group == 1:  # where the ring counts from its first token
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
        """Bring what was recalled for later."""
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
    """Put the j-th missing token of a head into its j-th slot that is free, in time linear in the context.

    resident [Hk, S] and selected [Hk, k], k <= S, hold token numbers below `length`; EMPTY in `resident` is an empty
    slot, which those are afterwards whose token left the selection and that no other took. A selection has no
    duplicates. Returns which tokens are missing, and their slots.
    """
    if resolve_rows.suits(resident, selected, length):
        return resolve_rows.resolve(resident, selected, length)
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
