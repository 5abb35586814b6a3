"""Attention over all keys from attention over parts of them, on the device; the sinks join the norm.

    z_h = log(sum_s e^norm_hs + e^sink_h)      out_h = sum_s e^(norm_hs - z_h) part_hs

s runs over disjoint parts of the keys: part is the output of one, norm its log-sum-exp (-inf where it has no keys).

Shapes: parts [b, H, splits, d] and norms [b, H, splits] in fp32, sinks [H], heads [b, Hk] -> out [b, H, d].
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels._triton import jit, launch, power_of_two, takes, tl


def merge_parts_ref(parts: Tensor, norms: Tensor, sinks: Tensor | None, heads: Tensor | None, out: Tensor) -> None:
    """Plain torch in the precision of its input."""
    logits = norms if sinks is None else torch.cat((norms, sinks.to(norms).expand(norms.shape[:2])[..., None]), -1)
    weights = torch.exp(norms - logits.logsumexp(-1, keepdim=True)).nan_to_num()  # 0 where no part has keys
    merged = (weights[..., None, :] @ parts)[..., 0, :].to(out.dtype)
    if heads is None:
        out.copy_(merged)
    else:
        asked = heads.repeat_interleave(out.shape[1] // heads.shape[1], 1)  # [b, H]
        out.copy_(merged.where(asked[..., None], out))


@jit
def _merge_kernel(
    parts: tl.tensor,
    norms: tl.tensor,
    sinks: tl.tensor,
    heads: tl.tensor,
    out: tl.tensor,
    out_batch: tl.tensor,
    out_head: tl.tensor,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    row = tl.program_id(0)  # a query head of a sequence
    if heads is not None:
        if tl.load(heads + row // G) == 0:
            return
    split, c = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    at = row.to(tl.int64) * SPLITS + split
    norm = tl.load(norms + at, mask=split < SPLITS, other=float("-inf"))
    shift = tl.max(norm, axis=0)
    if sinks is not None:
        sink = tl.load(sinks + row % H).to(tl.float32)
        shift = tl.maximum(shift, sink)
    shift = tl.where(shift == float("-inf"), 0.0, shift)
    weights = tl.exp(norm - shift)
    total = tl.sum(weights, axis=0)
    if sinks is not None:
        total += tl.exp(sink - shift)
    inside = (split < SPLITS)[:, None] & (c < D)[None, :]
    part = tl.load(parts + at[:, None] * D + c[None, :], mask=inside, other=0.0)
    merged = tl.sum(part * weights[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    target = out + (row // H).to(tl.int64) * out_batch + (row % H) * out_head + c
    tl.store(target, merged.to(out.dtype.element_ty), mask=c < D)


def merge_parts(parts: Tensor, norms: Tensor, sinks: Tensor | None, heads: Tensor | None, out: Tensor) -> None:
    """Write `out`, that of the KV heads flagged in `heads` alone where it is given; without any keys it is 0.

    May be captured in a CUDA graph.
    """
    if not takes(parts):
        return merge_parts_ref(parts, norms, sinks, heads, out)
    b, num_heads, splits, d = parts.shape
    launch(
        _merge_kernel,
        (b * num_heads,),
        *(parts, norms, sinks, heads, out, *out.stride()[:2]),
        H=num_heads,
        G=1 if heads is None else num_heads // heads.shape[1],
        D=d,
        SPLITS=splits,
        BLOCK_S=power_of_two(splits),
        BLOCK_D=max(16, power_of_two(d)),
    )
    return None
