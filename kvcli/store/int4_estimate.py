"""A layer on the device with page summaries to choose pages, and four-bit keys to weigh single tokens (Twilight)."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvcli.kernels.block_attention import add_sinks, block_attention
from kvcli.kernels.softmax import Softmax
from kvcli.store.cache import Footprint, Tiers, Traffic, nbytes
from kvcli.store.pages import PageBudget
from kvcli.store.resident_pages import ResidentPageCache

# Tokens whose keys are quantised at once: fp32 copies of them stay this long.
PIECE = 4096
LEVELS = 15  # steps between a token's least and greatest channel


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


def quantise_four_bit(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise keys [Hk, n, d] to four bits a channel, by each token's least and greatest channel.

        z = min      s = (max - min) / 15      code = round((k - z) / s)      k ~ code * s + z

    Returns codes [Hk, n, ceil(d / 2)] uint8, whose low half of byte j is channel j and whose high half is channel
    j + ceil(d / 2); and ranges [Hk, n, 2], s and z in the dtype of the keys, with which the codes were taken.
    """
    low, high = (bound.to(_accumulating(keys)) for bound in torch.aminmax(keys, dim=-1))  # [Hk, n]
    ranges = torch.stack(((high - low) / LEVELS, low), -1).to(keys.dtype)
    scale, zero = ranges.to(low.dtype)[..., None].unbind(2)  # [Hk, n, 1]
    smallest = torch.finfo(low.dtype).tiny  # a token whose channels are all equal: every code is 0
    codes = ((keys - zero) / scale.clamp_min(smallest)).round().clamp(0, LEVELS).to(torch.uint8)
    first, second = pad(codes, (0, keys.shape[-1] % 2)).chunk(2, -1)
    return first | (second << 4), ranges


def four_bit_scores(q: Tensor, codes: Tensor, ranges: Tensor) -> Tensor:
    """Score tokens: q [Hk, G, d], codes [Hk, n, bytes], ranges [Hk, n, 2] -> [Hk, G, n] in at least fp32, unscaled.

    q . k_t ~ s_t * sum_c q_c code_tc + z_t * sum_c q_c
    """
    q = q.to(_accumulating(q))
    first, second = pad(q, (0, q.shape[-1] % 2)).chunk(2, -1)  # [Hk, G, bytes]
    low, high = (half.to(q.dtype).transpose(1, 2) for half in (codes & LEVELS, codes >> 4))
    scale, zero = ranges.to(q.dtype)[:, None].unbind(-1)  # [Hk, 1, n]
    return (first @ low + second @ high) * scale + q.sum(-1, keepdim=True) * zero


def ragged_attention(q: Tensor, k: Tensor, v: Tensor, valid: Tensor, softmax: Softmax) -> Tensor:
    """Attend with one new token where every KV head has keys of its own: those marked in `valid` [Hk, n] bool.

    q [H, d], k, v [Hk, n, d], at least one valid key in each row -> [H, d]. What stands in rows that are not valid does
    not matter, as long as it is finite.
    """
    heads = q.view(k.shape[0], -1, q.shape[-1])  # [Hk, G, d]
    mask = valid[:, None].expand(-1, heads.shape[1], -1)  # [Hk, G, n]
    out, lse = block_attention(heads, k, v, softmax, mask=mask)
    if softmax.sinks is not None:
        out = add_sinks(out, lse, softmax.sinks.view_as(lse))
    return out.reshape(q.shape)


def _accumulating(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)
