"""Query similarity: how far a query turned since the last step (FreeKV, section 3.3), and which KV heads are corrected.

Shapes: q, previous [H, d] (post-RoPE) -> similarity [Hk], the cosine of each query head pooled over its group.
`correct_heads` decides on the device, for a batch.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvcli.kernels._triton import jit, launch, power_of_two, require, require_whole, takes, tl
from kvcli.kernels.page_table import SlotLayout, active


class Turn(IntEnum):
    """The action of a KV head at a step."""

    IDLE = 0
    """Its sequence has not outgrown its slots."""
    REUSED = 1
    """It attends to the last step's selection, and selects for the next."""
    CORRECTED = 2
    """Its query turned too far: it selects and recalls before it attends."""
    FIRST = 3
    """It has nothing to reuse yet, and selects and recalls before it attends."""


class Decision(NamedTuple):
    """Actions of the KV heads [b, Hk] of a batch: which wait (`now`), which do not, which of these select later (bool).

    `turn` (int32) is the action as `Turn`. `retrieved` (int32) is state: zero until a head's first retrieval.
    """

    now: Tensor
    others: Tensor
    later: Tensor
    turn: Tensor
    retrieved: Tensor


def query_similarity(q: Tensor, previous: Tensor, num_kv_heads: int, pooling: Literal["mean", "max"]) -> Tensor:
    """Return the cosine in fp32, pooled by KV head: [Hk]; a zero query has cosine 0 with everything."""
    q, previous = q.float(), previous.float()
    norms = q.square().sum(-1) * previous.square().sum(-1)
    cosines = (q * previous).sum(-1) * norms.clamp_min(torch.finfo(norms.dtype).tiny).rsqrt()  # [H]
    cosines = cosines.view(num_kv_heads, -1)  # [Hk, G]
    return cosines.mean(1) if pooling == "mean" else cosines.amax(1)


def correct_heads_ref(
    q: Tensor,
    previous: Tensor,
    lengths: Tensor,
    layout: SlotLayout,
    threshold: float,
    pooling: Literal["mean", "max"],
    decision: Decision,
) -> None:
    """Reference of `correct_heads`: sequence by sequence."""
    for b, retrieves in enumerate(active(lengths, layout).tolist()):
        now, others, later, turn, retrieved = (part[b] for part in decision)
        turned = query_similarity(q[b], previous[b], len(now), pooling) < threshold
        first = retrieved == 0
        now.copy_((first | turned) & retrieves)
        others.copy_(~now)
        later.copy_(~(first | turned) & retrieves)
        turn.copy_(torch.where(first, Turn.FIRST, torch.where(turned, Turn.CORRECTED, Turn.REUSED)) * retrieves)
        if retrieves:
            retrieved.fill_(1)
            previous[b] = q[b]


@jit
def _correct_kernel(
    q: tl.tensor,
    previous: tl.tensor,
    lengths: tl.tensor,
    now: tl.tensor,
    others: tl.tensor,
    later: tl.tensor,
    turn: tl.tensor,
    retrieved: tl.tensor,
    q_batch: tl.tensor,
    q_head: tl.tensor,
    threshold: tl.tensor,
    HK: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    TOTAL: tl.constexpr,
    POOLING: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    pair = tl.program_id(0)  # a KV head of a sequence
    b, h = (pair // HK).to(tl.int64), (pair % HK).to(tl.int64)
    if tl.cdiv(tl.load(lengths + b), SIZE) <= TOTAL:
        tl.store(now + pair, False)
        tl.store(others + pair, True)
        tl.store(later + pair, False)
        tl.store(turn + pair, 0)
        return
    g = tl.arange(0, BLOCK_G)
    new_at = q + b * q_batch + (h * G + g)[:, None] * q_head
    old_at = previous + (pair.to(tl.int64) * G + g)[:, None] * D
    squares_x = tl.zeros([BLOCK_G], tl.float32)
    squares_y, products = squares_x, squares_x
    for begin in range(0, D, BLOCK_D):  # one iteration, except for latents
        c = begin + tl.arange(0, BLOCK_D)[None, :]
        inside = (g < G)[:, None] & (c < D)
        x = tl.load(new_at + c, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(old_at + c, mask=inside, other=0.0).to(tl.float32)
        squares_x += tl.sum(x * x, axis=1)
        squares_y += tl.sum(y * y, axis=1)
        products += tl.sum(x * y, axis=1)
    cosines = products * tl.rsqrt(tl.maximum(squares_x * squares_y, 1.1754943508222875e-38))  # smallest normal fp32
    if POOLING == "mean":
        similarity = tl.sum(tl.where(g < G, cosines, 0.0), axis=0) / G
    else:
        similarity = tl.max(tl.where(g < G, cosines, float("-inf")), axis=0)
    first = tl.load(retrieved + pair) == 0
    waits = first | (similarity < threshold)
    tl.debug_barrier()  # all warps have read the state before one changes it
    tl.store(now + pair, waits)
    tl.store(others + pair, waits == 0)
    tl.store(later + pair, waits == 0)
    tl.store(turn + pair, tl.where(first, 3, tl.where(waits, 2, 1)))
    tl.store(retrieved + pair, 1)
    for begin in range(0, D, BLOCK_D):
        c = begin + tl.arange(0, BLOCK_D)[None, :]
        inside = (g < G)[:, None] & (c < D)
        tl.store(old_at + c, tl.load(new_at + c, mask=inside, other=0.0), mask=inside)


def correct_heads(
    q: Tensor,
    previous: Tensor,
    lengths: Tensor,
    layout: SlotLayout,
    threshold: float,
    pooling: Literal["mean", "max"],
    decision: Decision,
) -> None:
    """Write to `decision` which KV heads wait for what they select now, and keep the query for the next step.

    q [b, H, d] of this step; previous [b, H, d] of the step before, overwritten where the sequence has outgrown its
    slots; lengths [b] int32. A head waits at its first retrieval, and where its similarity is below `threshold`: a
    threshold above 1 means always, below -1 never. A new batch has `decision.retrieved` zero everywhere, and `previous`
    need not be initialised. Can be captured in a CUDA graph.

    Raises ValueError for shapes, dtypes or strides that the kernel cannot read.
    """
    (b, num_heads, d), num_kv_heads = q.shape, decision.now.shape[1]
    require("q", q, q.shape)
    require_whole("previous", previous, q.shape, q.dtype)
    require_whole("lengths", lengths, (b,), torch.int32)
    for name, x, dtype in zip(Decision._fields, decision, (*[torch.bool] * 3, torch.int32, torch.int32), strict=True):
        require_whole(name, x, (b, num_kv_heads), dtype)
    if not takes(q):
        return correct_heads_ref(q, previous, lengths, layout, threshold, pooling, decision)
    groups = num_heads // num_kv_heads
    launch(
        _correct_kernel,
        (b * num_kv_heads,),
        *(q, previous, lengths, *decision, *q.stride()[:2], threshold),
        HK=num_kv_heads,
        G=groups,
        D=d,
        SIZE=layout.size,
        TOTAL=layout.total,
        POOLING=pooling,
        BLOCK_G=power_of_two(groups),
        BLOCK_D=min(128, power_of_two(d)),
    )
    return None
