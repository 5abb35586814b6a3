"""Caches of RazorAttention: heads that keep one token for all they drop, next to heads that keep everything."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.decode_attention import TokenSet, attend_sets
from kvcli.kernels.softmax import Softmax
from kvcli.kv.cache import DenseCache, LayerCache, LayerSlots, Tiers
from kvcli.kv.narrow import NarrowCache
from kvcli.kv.sliding import SlidingCache
from kvcli.memory.tiers import Footprint, Traffic, nbytes


class CompensatedCache(SlidingCache):
    """Sinks and a window on the device, and mean key and value [Hk, d], in fp32, of the tokens between them.

    The means make up the paper's compensation token (arXiv 2407.15891, section 3.2).
    """

    def __init__(self, num_kv_heads: int, head_dim: int, window: int, tiers: Tiers, sink: int = 0):
        super().__init__(num_kv_heads, head_dim, window, tiers, sink)
        self.mean_k, self.mean_v = (
            tiers.on_device(num_kv_heads, head_dim, dtype=torch.float32).zero_() for _ in range(2)
        )

    @override
    def load(self, k: Tensor, v: Tensor) -> int:
        super().load(k, v)
        if self.dropped:
            gone = slice(self.sink, self.sink + self.dropped)
            self.mean_k[:] = k[:, gone].mean(1, dtype=torch.float32)
            self.mean_v[:] = v[:, gone].mean(1, dtype=torch.float32)
        return 0

    @override
    def append(self, k: Tensor, v: Tensor) -> int:
        """Store the current token; the one that leaves the window joins the means."""
        if self.length >= self.sink + self.window:
            row = self.row_of(self.length)
            for mean, kept in ((self.mean_k, self.k), (self.mean_v, self.v)):
                mean += (kept[:, row] - mean) / (self.dropped + 1)
        return super().append(k, v)

    @override
    def attend(self, q: Tensor, softmax: Softmax) -> Tensor:
        """Attend to the held tokens and to the compensation token, which counts as all the tokens that it replaces."""
        if not self.dropped:
            return super().attend(q, softmax)
        return compensated_attention(q, *self.resident(), self.mean_k, self.mean_v, self.dropped, softmax)

    @override
    def footprint(self) -> Footprint:
        return super().footprint() + Footprint(device=nbytes(self.mean_k, self.mean_v))


class HeadSplitCache(LayerCache):
    """Two caches on the device: `whole` for the KV heads marked in `keep` [Hk] bool, `local` for the others."""

    def __init__(self, keep: Tensor, whole: DenseCache | NarrowCache, local: SlidingCache, tiers: Tiers):
        self.length = 0
        heads = torch.arange(len(keep))
        self.parts: list[tuple[Tensor, DenseCache | NarrowCache | SlidingCache]] = [
            (heads[chosen].to(tiers.device), part) for chosen, part in ((keep, whole), (~keep, local)) if chosen.any()
        ]

    @override
    def load(self, k: Tensor, v: Tensor) -> int:
        self.length = k.shape[1]
        return sum(part.load(k[heads], v[heads]) for heads, part in self.parts)

    @override
    def append(self, k: Tensor, v: Tensor) -> int:
        self.length += 1
        return sum(part.append(k[heads], v[heads]) for heads, part in self.parts)

    @override
    def attend(self, q: Tensor, softmax: Softmax) -> Tensor:
        num_kv_heads = sum(len(heads) for heads, _ in self.parts)
        groups = q.view(num_kv_heads, -1, q.shape[-1])  # [Hk, G, d]
        out = torch.empty_like(groups)
        for heads, part in self.parts:
            sinks = softmax.sinks
            if sinks is not None:
                sinks = sinks.view(num_kv_heads, -1)[heads].flatten()
            part_out = part.attend(groups[heads].flatten(0, 1), softmax._replace(sinks=sinks))
            out[heads] = part_out.view(len(heads), *groups.shape[1:])
        return out.view_as(q)

    @property
    @override
    def apart(self) -> Sequence[tuple[Tensor, LayerCache]]:
        return self.parts if len(self.parts) > 1 else ()

    @override
    def as_slots(self) -> LayerSlots | None:
        return None if self.apart else self.parts[0][1].as_slots()

    @override
    def adopt_slots(self, slots: LayerSlots) -> None:
        self.parts[0][1].adopt_slots(slots)

    @override
    def attended(self) -> Tensor:
        """Mark the tokens attended to, without the compensation token."""
        order = torch.cat([heads for heads, _ in self.parts])
        return torch.cat([part.attended() for _, part in self.parts])[order.argsort()]

    @override
    def footprint(self) -> Footprint:
        return sum((part.footprint() for _, part in self.parts), Footprint())

    @override
    def traffic(self, length: int) -> Traffic:
        return Traffic(attended=sum(part.traffic(length).attended for _, part in self.parts))


def compensated_attention(
    q: Tensor, k: Tensor, v: Tensor, mean_k: Tensor, mean_v: Tensor, count: int, softmax: Softmax
) -> Tensor:
    """Attend to resident keys and one token that stands for N = `count` dropped ones (arXiv 2407.15891, equation 5).

        out_h = (sum_j e^(s_hj) v_j + N e^(t_h) v') / (sum_j e^(s_hj) + N e^(t_h) + e^sink)
        s_hj = f(scale * q_h . k_j)      t_h = f(scale * q_h . k')

    k', v' [Hk, d] are the means of the N >= 1 dropped keys and values. The token counts N times: log N is added to its
    score. f is the model's softcap. q [H, d], k, v [Hk, n, d] -> [H, d].
    """
    heads = q.view(k.shape[0], -1, q.shape[-1])  # [Hk, G, d]
    often = mean_k.new_full((len(k), 1, 1), math.log(count), dtype=torch.float32)
    mean = TokenSet(heads, mean_k[:, None], mean_v[:, None], log_counts=often)
    return attend_sets(q, [TokenSet(heads, k, v), mean], softmax)
