"""A layer on the device with page summaries to choose pages, and four-bit keys to weigh single tokens (Twilight)."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvcli.kernels.four_bit_keys import four_bit_scores, quantise_four_bit
from kvcli.kernels.ragged_attention import ragged_attention
from kvcli.kernels.softmax import Softmax
from kvcli.store.cache import Footprint, Tiers, Traffic, nbytes
from kvcli.store.pages import PageBudget
from kvcli.store.resident_pages import ResidentPageCache

# Tokens whose keys are quantised at once: fp32 copies of them stay this long.
PIECE = 4096


class Ragged(NamedTuple):
    """Tokens [Hk, n] of every KV head, and which of them count: bool [Hk, n]."""

    tokens: Tensor
    valid: Tensor


class FourBitKeys:
    """Codes [Hk, capacity, ceil(d / 2)] and ranges [Hk, capacity, 2] of all tokens."""

    def __init__(self, num_kv_heads: int, head_dim: int, capacity: int, tiers: Tiers):
        self.codes = tiers.on_device(num_kv_heads, capacity, -(-head_dim // 2), dtype=torch.uint8)
        self.ranges = tiers.on_device(num_kv_heads, capacity, 2)

    def fill(self, first: int, keys: Tensor) -> None:
        """Quantise consecutive tokens from token `first` on: keys [Hk, n, d]."""
        for start in range(0, keys.shape[1], PIECE):
            piece = keys[:, start : start + PIECE]
            part = slice(first + start, first + start + piece.shape[1])
            self.codes[:, part], self.ranges[:, part] = quantise_four_bit(piece)

    def products(self, q: Tensor, tokens: Tensor) -> Tensor:
        """Estimate q.k of `tokens` [Hk, n] with q [H, d] for every query head: [Hk, G, n] in fp32."""
        heads = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
        queries = q.float().view(tokens.shape[0], -1, q.shape[-1])
        return four_bit_scores(queries, self.codes[heads, tokens], self.ranges[heads, tokens])

    def nbytes(self, tokens: int | None = None) -> int:
        """Bytes on the device, of all tokens or of so many."""
        return nbytes(self.codes[:, :tokens], self.ranges[:, :tokens])


class Int4EstimateCache(ResidentPageCache):
    """Pages that single tokens are taken of, for each KV head a number of its own."""

    def __init__(self, num_kv_heads: int, head_dim: int, capacity: int, budget: PageBudget, tiers: Tiers):
        super().__init__(num_kv_heads, head_dim, capacity, budget, tiers)
        self.estimate = FourBitKeys(num_kv_heads, head_dim, self.k.shape[1], tiers)
        self.taken: Ragged | None = None  # tokens last attended to; None: everything

    def load(self, k: Tensor, v: Tensor) -> int:
        """See `LayerCache.load`."""
        self.estimate.fill(0, k)
        return super().load(k, v)

    def append(self, k: Tensor, v: Tensor) -> int:
        """See `LayerCache.append`."""
        self.estimate.fill(self.length, k[:, None])
        return super().append(k, v)

    def tokens_of(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens of sink, `pages` [Hk, k] and window: [Hk, n]; and which of them are sink or window: bool [n]."""
        num_kv_heads, size, candidates = pages.shape[0], self.budget.size, self.candidates
        sink = torch.arange(candidates.start * size, device=pages.device)
        window = torch.arange(candidates.stop * size, self.length, device=pages.device)
        inside = (pages[:, :, None] * size + torch.arange(size, device=pages.device)).flatten(1)
        parts = (sink.expand(num_kv_heads, -1), inside, window.expand(num_kv_heads, -1))
        always = torch.ones(len(sink) + inside.shape[1] + len(window), dtype=torch.bool, device=pages.device)
        always[len(sink) : len(sink) + inside.shape[1]] = False
        return torch.cat(parts, 1), always

    def attend_tokens(self, q: Tensor, tokens: Tensor, kept: Tensor, softmax: Softmax) -> Tensor:
        """Attend with q [H, d] to those of `tokens` [Hk, n] that are `kept`, bool [Hk, n] -> [H, d]."""
        most = int(kept.sum(1).max())
        first = kept.int().argsort(dim=1, descending=True, stable=True)[
            :, :most
        ]  # the kept ones of a head, then others
        self.taken = Ragged(tokens.gather(1, first), kept.gather(1, first))
        heads = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
        k, v = (kv[heads, self.taken.tokens] for kv in (self.k, self.v))
        return ragged_attention(q, k, v, self.taken.valid, softmax)

    def attended(self) -> Tensor:
        """See `LayerCache.attended`."""
        if self.taken is None:
            return super().attended()
        nothing = self.taken.valid.new_zeros(self.k.shape[0], self.length)
        return nothing.scatter(1, self.taken.tokens, self.taken.valid)

    def footprint(self) -> Footprint:
        """See `LayerCache.footprint`."""
        return super().footprint() + Footprint(device=self.estimate.nbytes())

    def traffic(self, length: int) -> Traffic:
        """See `LayerCache.traffic`; at most, for how many tokens are taken shows only at the step."""
        most = super().traffic(length)
        if not self.budget.active(length):
            return most
        weighed = self.budget.tokens(length)
        scores = most.scores + 4 * self.k.shape[0] * weighed
        return replace(most, scored=most.scored + self.estimate.nbytes(weighed), scores=scores)
