"""The caches of Twilight: pages are selected first, and then tokens of them (arXiv 2502.02770).

Pages are scored by their summaries; the attention weights of their tokens are estimated by keys of four bits.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels._triton import takes
from kvcli.kernels.decode_attention import TokenSet, attend_chosen, attend_chosen_suits, attend_rows, attend_sets
from kvcli.kernels.softmax import Softmax
from kvcli.kv.cache import LayerCache, LayerSlots, Tiers, both, token_mask
from kvcli.kv.paged import OffloadedPageCache, ResidentPageCache
from kvcli.kv.pages import PageBudget, PagedCache, take
from kvcli.memory.state import Settled
from kvcli.memory.tiers import Footprint, Traffic, nbytes
from kvcli.methods.twilight import kernels as twilight_kernels
from kvcli.methods.twilight.kernels import four_bit_scores, quantise_four_bit
from kvcli.sizes import slices

# Tokens whose keys are quantised at once; bounds the fp32 copies.
PIECE = 4096


class RaggedTokens(NamedTuple):
    """A different number of tokens per KV head: those of `tokens` [Hk, n] that are marked in `valid` [Hk, n]."""

    tokens: Tensor
    valid: Tensor


class Int4Keys:
    """The keys of all tokens in four bits per channel: `codes` [Hk, capacity, ceil(d / 2)] uint8, two channels a byte.

    `ranges` [Hk, capacity, 2] are the step and the least value of each token. Both are on the device.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, capacity: int, tiers: Tiers):
        self.codes = tiers.on_device(num_kv_heads, capacity, -(-head_dim // 2), dtype=torch.uint8)
        self.ranges = tiers.on_device(num_kv_heads, capacity, 2)
        self.filled = 0  # tokens

    def fill(self, first: int, keys: Tensor) -> None:
        """Quantise consecutive tokens from token `first` on: keys [Hk, n, d]."""
        self.filled = first + keys.shape[1]
        codes, ranges = self.codes[:, first:], self.ranges[:, first:]
        for part in slices(keys.shape[1], PIECE):
            codes[:, part], ranges[:, part] = quantise_four_bit(keys[:, part], self.filled)

    def products(self, q: Tensor, tokens: Tensor) -> Tensor:
        """Estimate the products of queries [H, d] with the keys of `tokens` [Hk, n]: [Hk, G, n] in fp32."""
        queries = q.float().view(tokens.shape[0], -1, q.shape[-1])
        if twilight_kernels.four_bit_loops_suit(queries, self.codes, self.ranges):
            return twilight_kernels.four_bit_scores_cpu(queries, self.codes, self.ranges, tokens)
        return four_bit_scores(queries, take(self.codes, tokens), take(self.ranges, tokens))

    def settled(self) -> list[Settled]:
        """Return the keys, which do not change."""
        return [Settled(self.codes, 1, self.filled), Settled(self.ranges, 1, self.filled)]

    def nbytes(self, tokens: int | None = None) -> int:
        """Count the bytes on the device, of all tokens or of the first `tokens`."""
        return nbytes(self.codes[:, :tokens], self.ranges[:, :tokens])


class EstimatedPageCache(PagedCache, LayerCache):
    """Shared part of resident and offloaded pages whose tokens are chosen by four-bit keys of all tokens."""

    estimate: Int4Keys
    read: RaggedTokens | None = None
    """Tokens last attended to, None for all."""

    @override
    def as_slots(self) -> LayerSlots:
        slots, estimate = super().as_slots(), self.estimate
        assert slots is not None
        return slots._replace(tensors={**slots.tensors, "codes": estimate.codes, "ranges": estimate.ranges})

    @override
    def adopt_slots(self, slots: LayerSlots) -> None:
        super().adopt_slots(slots)
        self.estimate.codes, self.estimate.ranges = slots.tensors["codes"], slots.tensors["ranges"]

    def tokens_of(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """List the tokens of sink, `pages` [Hk, k] and window: [Hk, n]; and mark those of sink and window: bool [n]."""
        num_kv_heads, size, candidates = pages.shape[0], self.budget.size, self.candidates
        sink = torch.arange(candidates.start * size, device=pages.device)
        window = torch.arange(candidates.stop * size, self.length, device=pages.device)
        inside = (pages[:, :, None] * size + torch.arange(size, device=pages.device)).flatten(1)
        parts = (sink.expand(num_kv_heads, -1), inside, window.expand(num_kv_heads, -1))
        always = torch.ones(len(sink) + inside.shape[1] + len(window), dtype=torch.bool, device=pages.device)
        always[len(sink) : len(sink) + inside.shape[1]] = False
        return torch.cat(parts, 1), always

    @abstractmethod
    def attend_tokens(self, q: Tensor, tokens: Tensor, kept: Tensor, softmax: Softmax) -> Tensor:
        """Attend with q [H, d] to those of `tokens` [Hk, n] that are `kept`, bool [Hk, n]; return [H, d].

        They are tokens of sink, window, and pages that the device holds by now.
        """

    @override
    def attended(self) -> Tensor:
        if self.read is None:
            return token_mask(self.estimate.codes, self.length, range(self.length))
        nothing = self.read.valid.new_zeros(len(self.read.valid), self.length)
        return nothing.scatter(1, self.read.tokens, self.read.valid)

    @override
    def traffic(self, length: int) -> Traffic:
        """Estimate a step that keeps all tokens of the selected pages, which is the most possible."""
        most = super().traffic(length)
        if not self.budget.active(length):
            return most
        estimated = self.budget.tokens(length)
        scores = most.scores + 4 * len(self.estimate.codes) * estimated
        return replace(most, scored=most.scored + self.estimate.nbytes(estimated), scores=scores)


class Int4EstimateCache(EstimatedPageCache, ResidentPageCache):
    """Keys and values k, v [Hk, pages * p, d] of every token on the device, with page summaries and four-bit keys."""

    def __init__(self, num_kv_heads: int, head_dim: int, capacity: int, budget: PageBudget, tiers: Tiers):
        super().__init__(num_kv_heads, head_dim, capacity, budget, tiers)
        self.estimate = Int4Keys(num_kv_heads, head_dim, self.k.shape[1], tiers)

    @override
    def load(self, k: Tensor, v: Tensor) -> int:
        self.estimate.fill(0, k)
        return super().load(k, v)

    @override
    def take_row(self) -> int:
        self.estimate.fill(self.length, self.k[:, self.length : self.length + 1])
        return super().take_row()

    @override
    def attend_tokens(self, q: Tensor, tokens: Tensor, kept: Tensor, softmax: Softmax) -> Tensor:
        self.read = RaggedTokens(*twilight_kernels.kept_first_cpu(tokens, kept))
        return attend_ragged(q, self.k, self.v, self.read, softmax)

    @override
    def footprint(self) -> Footprint:
        return super().footprint() + Footprint(device=self.estimate.nbytes())


class OffloadedInt4EstimateCache(EstimatedPageCache, OffloadedPageCache):
    """All full pages in host memory; on the device a budget of pages, the page summaries, and four-bit keys."""

    def __init__(self, num_kv_heads: int, head_dim: int, capacity: int, budget: PageBudget, tiers: Tiers):
        super().__init__(num_kv_heads, head_dim, capacity, budget, tiers)
        self.estimate = Int4Keys(num_kv_heads, head_dim, budget.count(capacity) * budget.size, tiers)

    @override
    def waiting(self) -> Sequence[Tensor]:
        return *super().waiting(), self.estimate.codes, self.estimate.ranges

    @override
    def load(self, k: Tensor, v: Tensor) -> int:
        self.estimate.fill(0, k)
        return super().load(k, v)

    @override
    def take_row(self) -> int:
        _, row, slot = self._next
        self.estimate.fill(self.length, self.kv[0, :, slot, row : row + 1])
        return super().take_row()

    @override
    def attend_tokens(self, q: Tensor, tokens: Tensor, kept: Tensor, softmax: Softmax) -> Tensor:
        self.read = RaggedTokens(tokens, kept)
        in_slots, _ = self.tokens_of(self.resident)  # the token of each row
        rows = torch.arange(in_slots.shape[1], device=q.device).expand_as(in_slots)
        chosen = RaggedTokens(*twilight_kernels.kept_first_cpu(rows, self.attended().gather(1, in_slots)))
        return attend_ragged(q, *both(self.kv.flatten(2, 3)), chosen, softmax)

    @override
    def footprint(self) -> Footprint:
        return super().footprint() + Footprint(device=self.estimate.nbytes())


def attend_ragged(q: Tensor, k: Tensor, v: Tensor, rows: RaggedTokens, softmax: Softmax) -> Tensor:
    """Attend with q [H, d] to rows of k, v [Hk, rows, d], each KV head to its own; return [H, d]."""
    if attend_chosen_suits(q, k, v, rows.tokens):
        return attend_chosen(q, k, v, rows.tokens, softmax, rows.valid)
    return ragged_attention(q, take(k, rows.tokens), take(v, rows.tokens), rows.valid, softmax)


def ragged_attention(q: Tensor, k: Tensor, v: Tensor, valid: Tensor, softmax: Softmax) -> Tensor:
    """Attend with one new token where every KV head has its own keys: those marked in `valid` [Hk, n] bool.

    q [H, d], k, v [Hk, n, d], at least one valid key in each row -> [H, d]. Invalid rows may hold anything finite.
    """
    if takes(q):
        return attend_rows(q, k, v, softmax, valid.contiguous())
    return attend_sets(q, [TokenSet(q.view(len(k), -1, q.shape[-1]), k, v, valid=valid)], softmax)
