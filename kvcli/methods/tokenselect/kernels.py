"""Kernels of TokenSelect: whether a whole layer's query still resembles the one that chose (section 4.3), for a batch.

    cosine = sum_hc q_hc * p_hc / (|q| * |p|), over all heads concatenated; a zero query has cosine 0 with everything

Shapes: q [b, H, d] and the query that chose, p [b, H, d] -> turned [b, Hk] bool, the same for all KV heads, and again
as anew [b, 1].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvcli.kernels._triton import jit, launch, power_of_two, require, require_whole, takes, tl

BLOCK_ELEMENTS = 4096  # of a query, held at once per program


class KeptQuery(NamedTuple):
    """State of a layer: the query [b, H, d] that chose last, zeros before the first choice; and two counts [b] int64.

    `layer_steps` counts the steps that retrieved, `choices` those that chose anew.
    """

    query: Tensor
    layer_steps: Tensor
    choices: Tensor


def turn_from_kept_ref(q: Tensor, kept: KeptQuery, active: Tensor, theta: float, turned: Tensor, anew: Tensor) -> None:
    """Reference of `turn_from_kept`: all sequences at once, in at least fp32."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    new, old = q.flatten(1).to(dtype), kept.query.flatten(1).to(dtype)  # [b, H * d]
    norms = new.square().sum(1) * old.square().sum(1)
    cosine = (new * old).sum(1) * norms.clamp_min(torch.finfo(norms.dtype).tiny).rsqrt()
    chooses = active[:, 0] & ((cosine < theta) | (kept.choices == 0))
    anew.copy_(chooses[:, None])
    turned.copy_(anew.expand_as(turned))
    kept.query.copy_(q.where(chooses[:, None, None], kept.query))
    kept.layer_steps.add_(active[:, 0])
    kept.choices.add_(chooses)


@jit
def _kept_kernel(
    q: tl.tensor,
    query: tl.tensor,
    layer_steps: tl.tensor,
    choices: tl.tensor,
    active: tl.tensor,
    turned: tl.tensor,
    anew: tl.tensor,
    q_batch: tl.tensor,
    q_head: tl.tensor,
    theta: tl.tensor,
    HK: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    b = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_K)
    if tl.load(active + b * HK) == 0:
        tl.store(turned + b * HK + head, head < 0, mask=head < HK)
        tl.store(anew + b, False)
        return
    c = tl.arange(0, BLOCK_D)
    both, new, old = tl.zeros([BLOCK_D], tl.float32), tl.zeros([BLOCK_D], tl.float32), tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, H, BLOCK_H):
        h = start + tl.arange(0, BLOCK_H)
        inside = (h < H)[:, None] & (c < D)[None, :]
        x = tl.load(q + b * q_batch + h[:, None] * q_head + c[None, :], mask=inside, other=0.0).to(tl.float32)
        y = tl.load(query + (b * H + h)[:, None] * D + c[None, :], mask=inside, other=0.0).to(tl.float32)
        both += tl.sum(x * y, axis=0)
        new += tl.sum(x * x, axis=0)
        old += tl.sum(y * y, axis=0)
    norms = tl.maximum(tl.sum(new, axis=0) * tl.sum(old, axis=0), 1.1754943508222875e-38)  # the smallest normal fp32
    cosine = tl.sum(both, axis=0) * tl.rsqrt(norms)
    steps, before = tl.load(layer_steps + b), tl.load(choices + b)
    chooses = (cosine < theta) | (before == 0)
    tl.debug_barrier()  # all warps have read the state before one changes it
    tl.store(turned + b * HK + head, tl.where(chooses, head < HK, head < 0), mask=head < HK)
    tl.store(anew + b, chooses)
    tl.store(layer_steps + b, steps + 1)
    tl.store(choices + b, before + chooses.to(tl.int64))
    if chooses:
        for start in range(0, H, BLOCK_H):
            h = start + tl.arange(0, BLOCK_H)
            inside = (h < H)[:, None] & (c < D)[None, :]
            x = tl.load(q + b * q_batch + h[:, None] * q_head + c[None, :], mask=inside, other=0.0)
            tl.store(query + (b * H + h)[:, None] * D + c[None, :], x, mask=inside)


def turn_from_kept(q: Tensor, kept: KeptQuery, active: Tensor, theta: float, turned: Tensor, anew: Tensor) -> None:
    """Flag the sequences that choose anew: cosine below `theta`, or no choice so far.

    active [b, Hk] bool is the same for all KV heads of a sequence; inactive sequences are skipped. The query of a
    sequence that chooses is kept, and steps and choices are counted. Can be captured in a CUDA graph.

    Raises ValueError for shapes, dtypes or strides that the kernel cannot read.
    """
    (b, num_heads, d), num_kv_heads = q.shape, active.shape[1]
    require("q", q, (b, num_heads, d))
    require_whole("query", kept.query, q.shape, q.dtype)
    for name, x in (("layer_steps", kept.layer_steps), ("choices", kept.choices)):
        require_whole(name, x, (b,), torch.int64)
    for name, x in (("active", active), ("turned", turned)):
        require_whole(name, x, (b, num_kv_heads), torch.bool)
    require_whole("anew", anew, (b, 1), torch.bool)
    if not takes(q):
        return turn_from_kept_ref(q, kept, active, theta, turned, anew)
    block_d = power_of_two(d)
    launch(
        _kept_kernel,
        (b,),
        *(q, *kept, active, turned, anew, *q.stride()[:2], theta),
        HK=num_kv_heads,
        H=num_heads,
        D=d,
        BLOCK_K=power_of_two(num_kv_heads),
        BLOCK_H=max(1, min(power_of_two(num_heads), BLOCK_ELEMENTS // block_d)),
        BLOCK_D=block_d,
        warps=8,
    )
    return None
