"""Prefill attention that leaves tokens out, and how much that was (arXiv 2407.02490).

A pattern is chosen anew for each chunk, by the chunk's last queries, where the paper has one for the whole prompt: what
is read by chunks is not known to its end. Some queries of each chunk, evenly spread, attend exactly as well: they tell
which part of the attention the pattern covers, and how far off the output is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvcli.kernels.block_attention import add_sinks, block_attention
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.sparse_prefill import ROWS, AShape, Pattern, sparse_attention, vertical_slash
from kvcli.methods._reading import PrefillPattern


class SparseReading:
    """Attends by a pattern while a prompt is read, and audits itself."""

    def __init__(self, reading: PrefillPattern):
        self.reading = reading
        self.audited: defaultdict[int, list[Tensor]] = defaultdict(list)  # layer -> [queries, mass, error^2, norm^2]

    @classmethod
    def of(cls, reading: PrefillPattern) -> SparseReading | None:
        """None where a prompt is read exactly."""
        return None if reading.pattern == "exact" else cls(reading)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """Attend with the next chunk, q [H, m, d], to a part of all keys up to it, k and v [Hk, n, d] -> [H, m, d]."""
        out, lse = sparse_attention(q, k, v, softmax, self._pattern(q, k, softmax))
        self.audited[layer].append(_audit(q, k, v, softmax, out, lse))
        return out if softmax.sinks is None else add_sinks(out, lse, softmax.sinks[:, None])

    def statistics(self) -> Mapping[str, Any]:
        """Say the pattern, the part of the attention that it covered, and the relative RMS error of the output.

        Over the audited queries of all heads; over all layers, and of each that did not attend to a window alone.
        """
        found = torch.stack([torch.stack(self.audited[layer]).sum(0) for layer in sorted(self.audited)])  # [layers, 4]
        queries, mass, off, norm = (found[:, at].tolist() for at in range(4))
        return {
            "prefill": str(self.reading),
            "prefill_mass": sum(mass) / sum(queries),
            "prefill_error": (sum(off) / sum(norm)) ** 0.5,
            "prefill_mass_by_layer": [m / n for m, n in zip(mass, queries, strict=True)],
            "prefill_error_by_layer": [(o / n) ** 0.5 for o, n in zip(off, norm, strict=True)],
        }

    def _pattern(self, q: Tensor, k: Tensor, softmax: Softmax) -> Pattern:
        first, second = self.reading.sizes
        if self.reading.pattern == "a-shape":
            return AShape(first, second, k.device)
        return vertical_slash(q, k, softmax, first, second)


def _audit(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, out: Tensor, lse: Tensor) -> Tensor:
    """Let some queries attend exactly: their number, and sums of mass covered, squared error and squared norm [4].

    The mass that a query's pattern covers is the ratio of the softmax's norms, e^(lse - lse of all keys).
    """
    (num_heads, m, _), n = q.shape, k.shape[1]
    rows = torch.linspace(0, m - 1, min(m, ROWS), device=q.device).round().long()
    causal = torch.arange(n, device=q.device) <= (n - m + rows)[:, None]  # [r, n]
    queries = q[:, rows].reshape(len(k), -1, q.shape[2])  # [Hk, G * r, d]
    exact, norm = block_attention(queries, k, v, softmax, causal.repeat(num_heads // len(k), 1))
    exact = exact.reshape(num_heads, len(rows), -1).float()
    covered = torch.exp(lse[:, rows] - norm.reshape(num_heads, -1))
    off = (out[:, rows].float() - exact).square().sum()
    found = (torch.tensor(float(covered.numel()), device=q.device), covered.sum(), off, exact.square().sum())
    return torch.stack([each.double() for each in found])
