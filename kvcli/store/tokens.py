"""A layer whose tokens are selected one by one, by keys of one bit a channel (FIER, arXiv 2508.08256, section 3.3).

Every full group of tokens is quantised on the device. The newest tokens, those of the unfilled group among them, are
always attended, so that what can be selected is quantised and what is not quantised is seen anyway. The KV itself is
on the device (`ResidentTokens`) or in host memory with the attended tokens on the device (`OffloadedTokens`).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvcli.kernels.decode_attention import decode_attention
from kvcli.kernels.group_pooling import Pooling, pool_queries, pool_scores
from kvcli.kernels.one_bit_keys import one_bit_scores, quantise_keys
from kvcli.kernels.resolve_tokens import resolve_tokens
from kvcli.kernels.softmax import Softmax
from kvcli.store.cache import DenseCache, Footprint, LayerCache, Tiers, Traffic, nbytes, token_mask
from kvcli.store.host import HostPool
from kvcli.store.pages import paged

EMPTY = -1  # a slot that holds no token


@dataclass(frozen=True)
class TokenBudget:
    """How a budget of `total` tokens splits: `sink` first, at least `window` last (>= 1), the rest selected.

    The recent tokens are the last `window` or those that fill no group of `group`, whichever are more; so their number
    goes up and down with the length, and that of the selected tokens down and up: the sum is always the budget.
    """

    total: int
    sink: int
    window: int
    group: int

    @property
    def most_selected(self) -> int:
        """Tokens selected where a group has just filled."""
        return self.total - self.sink - self.window

    @property
    def least_selected(self) -> int:
        """Tokens selected just before a group fills."""
        return self.total - self.sink - max(self.window, self.group - 1)

    def full(self, length: int) -> int:
        """Tokens that fill groups."""
        return length // self.group * self.group

    def candidates(self, length: int) -> range:
        """Tokens that can be selected: neither sink nor recent. Empty for short contexts."""
        sink = min(self.sink, length)
        return range(sink, max(sink, min(length - self.window, self.full(length))))


class OneBitIndex:
    """Codes [Hk, groups, g, bytes] and ranges [Hk, groups, 2, d] of the full groups, on the device."""

    def __init__(self, num_kv_heads: int, head_dim: int, group: int, num_groups: int, tiers: Tiers):
        self.group = group
        self.codes = tiers.on_device(num_kv_heads, num_groups, group, -(-head_dim // 8), dtype=torch.uint8)
        self.ranges = tiers.on_device(num_kv_heads, num_groups, 2, head_dim)

    def fill(self, first: int, keys: Tensor) -> None:
        """Quantise consecutive groups from group `first` on: keys [Hk, n * g, d]."""
        groups = paged(keys, self.group)
        part = slice(first, first + groups.shape[1])
        self.codes[:, part], self.ranges[:, part] = quantise_keys(groups)

    def scores(self, q: Tensor, tokens: range, scale: float, pooling: Pooling) -> Tensor:
        """Score consecutive tokens of full groups with q [H, d] for every KV head: [Hk, len(tokens)] in fp32."""
        heads = pool_queries(q.float().view(self.codes.shape[0], -1, q.shape[-1]), pooling)  # [Hk, G or 1, d]
        first = tokens.start // self.group
        part = slice(first, -(-tokens.stop // self.group))
        start = tokens.start - first * self.group
        scores = one_bit_scores(heads, self.codes[:, part], self.ranges[:, part])
        return pool_scores(scale * scores[..., start : start + len(tokens)], pooling)

    def traffic(self, budget: TokenBudget, length: int) -> Traffic:
        """What choosing tokens moves once `length` were seen."""
        candidates = budget.candidates(length)
        groups = slice(candidates.start // self.group, -(-candidates.stop // self.group))
        scored = nbytes(self.codes[:, groups], self.ranges[:, groups])
        return Traffic(scored=scored, scores=4 * self.codes.shape[0] * len(candidates))

    def load_ratio(self) -> float | None:
        """Bytes read to score all tokens, by the bytes of their full-precision keys; None where there is no group."""
        num_kv_heads, groups, group, _ = self.codes.shape
        keys = num_kv_heads * groups * group * self.ranges.shape[-1] * self.ranges.element_size()
        return self.nbytes() / keys if keys else None

    def nbytes(self) -> int:
        """Bytes on the device."""
        return nbytes(self.codes, self.ranges)


class TokenCache(LayerCache):
    """What both places of the KV have in common: what to select from, and attention to a selection."""

    budget: TokenBudget
    index: OneBitIndex
    k: Tensor
    v: Tensor
    chosen: Tensor | None = None
    """[Hk, k] tokens last attended to beside sink and recent ones; None: everything."""

    @property
    def active(self) -> bool:
        """Tell whether the context has outgrown the budget."""
        return self.length > self.budget.total

    @property
    def candidates(self) -> range:
        """Tokens that can be selected."""
        return self.budget.candidates(self.length)

    @property
    def selected(self) -> int:
        """How many of them fit into the budget beside sink and recent tokens; for a context that outgrew it."""
        candidates = self.candidates
        return self.budget.total - candidates.start - (self.length - candidates.stop)

    def traffic(self, length: int) -> Traffic:
        """See `LayerCache.traffic`."""
        token = nbytes(self.k[:, :1], self.v[:, :1])
        if length <= self.budget.total:
            return Traffic(attended=length * token)
        candidates = self.budget.candidates(length)
        chosen = self.budget.total - candidates.start - (length - candidates.stop)
        recalled = chosen * token if self.footprint().host else 0
        return replace(self.index.traffic(self.budget, length), attended=self.budget.total * token, recalled=recalled)

    @abstractmethod
    def recall(self, selected: Tensor) -> tuple[int, int]:
        """Bring the missing tokens of `selected` [Hk, k] to the device, evicting what left the selection.

        Returns the number of misses (a token of a KV head counts one) and the bytes moved.
        """

    @abstractmethod
    def attend_selected(self, q: Tensor, selected: Tensor, softmax: Softmax) -> Tensor:
        """Attend with q [H, d] to sink and recent tokens and those just recalled, `selected` [Hk, k] -> [H, d]."""

    def attended(self) -> Tensor:
        """See `LayerCache.attended`."""
        k, candidates = self.index.codes, self.candidates
        if self.chosen is None:
            return token_mask(k, self.length, range(self.length))
        always = token_mask(k, self.length, range(candidates.start), range(candidates.stop, self.length))
        return always.scatter(1, self.chosen, True)


class ResidentTokens(TokenCache, DenseCache):
    """Everything on the device: k, v [Hk, capacity, d]."""

    def __init__(self, num_kv_heads: int, head_dim: int, capacity: int, budget: TokenBudget, tiers: Tiers):
        super().__init__(num_kv_heads, head_dim, capacity, tiers)
        self.budget = budget
        self.index = OneBitIndex(num_kv_heads, head_dim, budget.group, capacity // budget.group, tiers)

    def load(self, k: Tensor, v: Tensor) -> int:
        """See `LayerCache.load`."""
        super().load(k, v)
        self.index.fill(0, k[:, : self.budget.full(self.length)])
        return 0

    def append(self, k: Tensor, v: Tensor) -> int:
        """See `LayerCache.append`; the group is quantised when it fills."""
        super().append(k, v)
        group = self.budget.group
        if self.length % group == 0:
            self.index.fill(self.length // group - 1, self.k[:, self.length - group : self.length])
        return 0

    def recall(self, selected: Tensor) -> tuple[int, int]:  # noqa: ARG002
        """See `TokenCache.recall`: nothing is ever missing."""
        return 0, 0

    def attend_selected(self, q: Tensor, selected: Tensor, softmax: Softmax) -> Tensor:
        """See `TokenCache.attend_selected`."""
        self.chosen = selected
        candidates = self.candidates
        heads = torch.arange(selected.shape[0], device=selected.device)[:, None]
        k, v = (
            torch.cat((kv[:, : candidates.start], kv[heads, selected], kv[:, candidates.stop : self.length]), 1)
            for kv in (self.k, self.v)
        )
        return decode_attention(q, k, v, softmax)

    def footprint(self) -> Footprint:
        """See `LayerCache.footprint`."""
        return super().footprint() + Footprint(device=self.index.nbytes())


class OffloadedTokens(TokenCache):
    """Full groups in host memory, token by token; on the device k, v [Hk, sink + selected + recent, d] in this order.

    Recent tokens lie in a ring of `recent` rows, so that a group is whole when it is put away. As long as the context
    has not outgrown the budget, the rows before the ring hold the first tokens.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, capacity: int, budget: TokenBudget, tiers: Tiers):
        self.length = 0
        self.budget = budget
        self.recent = max(budget.window, budget.group)
        self.index = OneBitIndex(num_kv_heads, head_dim, budget.group, capacity // budget.group, tiers)
        self.pool = HostPool(num_kv_heads, head_dim, 1, budget.full(capacity), tiers)
        self.first_rows = budget.sink + budget.most_selected
        self.k, self.v = (tiers.on_device(num_kv_heads, self.first_rows + self.recent, head_dim) for _ in range(2))
        self.resident = tiers.on_device(num_kv_heads, budget.most_selected, dtype=torch.int64)  # token in each slot
        self.resident[:] = torch.arange(budget.sink, self.first_rows, device=tiers.device)

    def load(self, k: Tensor, v: Tensor) -> int:
        """See `LayerCache.load`; full groups go to the host, nothing is selected yet."""
        self.length = k.shape[1]
        if self.active:
            self.resident.fill_(EMPTY)
        first = self.budget.sink if self.active else self.first_rows
        ring = torch.arange(max(0, self.length - self.recent), self.length, device=k.device)
        for rows, tokens in ((self.k, k), (self.v, v)):
            rows[:, : min(first, self.length)] = tokens[:, :first]
            rows[:, self._ring_rows(ring)] = tokens[:, ring]
        full = self.budget.full(self.length)
        return self._put_away(0, k[:, :full], v[:, :full])

    def append(self, k: Tensor, v: Tensor) -> int:
        """See `LayerCache.append`; a group that fills is quantised and written to the host."""
        at = self.length
        for rows, token in ((self.k, k), (self.v, v)):
            rows[:, self.first_rows + at % self.recent] = token
            if at < self.first_rows:
                rows[:, at] = token
        self.length += 1
        group = self.budget.group
        if self.length % group:
            return 0
        rows_of_group = self._ring_rows(torch.arange(self.length - group, self.length, device=k.device))
        return self._put_away(self.length - group, self.k[:, rows_of_group], self.v[:, rows_of_group])

    def recall(self, selected: Tensor) -> tuple[int, int]:
        """See `TokenCache.recall`."""
        misses, leaving = resolve_tokens(self.resident, selected, self.length)
        tokens = self.pool.gather(misses.pages, misses.heads).to(self.k.device)  # [m, 2, 1, d]
        rows = misses.slots + self.budget.sink
        self.k[misses.heads, rows] = tokens[:, 0, 0]
        self.v[misses.heads, rows] = tokens[:, 1, 0]
        self.resident[leaving] = EMPTY
        self.resident[misses.heads, misses.slots] = misses.pages
        return len(misses.pages), nbytes(tokens)

    def attend_selected(self, q: Tensor, selected: Tensor, softmax: Softmax) -> Tensor:
        """See `TokenCache.attend_selected`."""
        self.chosen = selected
        slots = (self.resident != EMPTY).nonzero()[:, 1].view_as(selected)
        return self._attend(q, slots + self.budget.sink, softmax)

    def attend(self, q: Tensor, softmax: Softmax) -> Tensor:
        """See `LayerCache.attend`; for a context that has not outgrown the budget."""
        candidates = self.candidates
        rows = torch.arange(candidates.start, candidates.stop, device=q.device)
        return self._attend(q, rows.expand(self.k.shape[0], -1), softmax)

    def footprint(self) -> Footprint:
        """See `LayerCache.footprint`."""
        device = nbytes(self.k, self.v, self.resident) + self.index.nbytes()
        return Footprint(device=device, host=self.pool.nbytes())

    def _attend(self, q: Tensor, chosen: Tensor, softmax: Softmax) -> Tensor:
        """Attend to the sinks, to rows `chosen` [Hk, k], and to what is recent."""
        candidates = self.candidates
        heads = torch.arange(chosen.shape[0], device=chosen.device)[:, None]
        recent = self._ring_rows(torch.arange(candidates.stop, self.length, device=chosen.device))
        k, v = (
            torch.cat((rows[:, : candidates.start], rows[heads, chosen], rows[:, recent]), 1)
            for rows in (self.k, self.v)
        )
        return decode_attention(q, k, v, softmax)

    def _put_away(self, first: int, k: Tensor, v: Tensor) -> int:
        """Quantise whole groups from token `first` on, k, v [Hk, n * g, d], and write them to the host."""
        self.index.fill(first // self.budget.group, k)
        return self.pool.write(first, k[:, :, None], v[:, :, None])

    def _ring_rows(self, tokens: Tensor) -> Tensor:
        return self.first_rows + tokens % self.recent
