"""Attention over all keys from attention over parts of them, inside a kernel; the sinks join the norm.

    z_h = log(sum_s e^norm_hs + e^sink_h)      out_h = sum_s e^(norm_hs - z_h) part_hs

s runs over disjoint parts of the keys: part is the output of one, norm its log-sum-exp (-inf where it has no keys).

Shapes: parts [b, H, splits, d] and norms [b, H, splits] in fp32, sinks [H] -> out [d] of one head.
"""

from __future__ import annotations

from kvcli.kernels._triton import jit, tl


@jit
def merge_parts(
    parts: tl.tensor,
    norms: tl.tensor,
    sinks: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    out: tl.tensor,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Merge the parts of query head `head`, row `row` of the batch's, into `out`; without any keys it is 0."""
    split = tl.arange(0, BLOCK_S)
    at = row.to(tl.int64) * SPLITS + split
    norm = tl.load(norms + at, mask=split < SPLITS, other=float("-inf"))
    shift = tl.max(norm, axis=0)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32)
        shift = tl.maximum(shift, sink)
    shift = tl.where(shift == float("-inf"), 0.0, shift)
    weights = tl.exp(norm - shift)
    total = tl.sum(weights, axis=0)
    if sinks is not None:
        total += tl.exp(sink - shift)
    for start in range(0, D, BLOCK_D):
        c = start + tl.arange(0, BLOCK_D)
        inside = (split < SPLITS)[:, None] & (c < D)[None, :]
        part = tl.load(parts + at[:, None] * D + c[None, :], mask=inside, other=0.0)
        merged = tl.sum(part * weights[:, None], axis=0) / tl.where(total > 0, total, 1.0)
        tl.store(out + c, merged.to(out.dtype.element_ty), mask=c < D)
