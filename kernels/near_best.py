"""Near-best counts: how many tokens score close to the best, averaged over a sequence's KV heads (InfiniGen, 4.3).

    wanted = floor(sum_h |{t : s_ht >= max_u s_hu - alpha}| / Hk), at least one and at most `most`

Shapes: scores [b, Hk, n] fp32 with -inf where nothing can be chosen -> wanted [b] int32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvcli.kernels._llvm import highest
from kvcli.kernels._numba import compiled, prange, run, serves
from kvcli.kernels._triton import jit, last_to_arrive, launch, power_of_two, require_whole, takes, tl


@compiled
def _count(scores: Any, alpha: Any, counts: Any) -> None:
    for h in prange(len(scores)):
        row, near = scores[h], 0
        top = highest(row)
        for i in range(len(row)):
            near += row[i] >= top - alpha
        counts[h] = near


def suits(scores: Tensor) -> bool:
    """Return whether `count` serves for these scores."""
    return serves(scores)


def count(scores: Tensor, alpha: float) -> Tensor:
    """Count the scores at most `alpha` below the best of their head, on a CPU; torch would read them four times."""
    counts = torch.empty(len(scores), dtype=torch.int64)
    run(_count, 2 * scores.numel(), scores.contiguous(), np.float32(alpha), counts)
    return counts


BLOCK = 4096  # scores per program at once


class NearTally(NamedTuple):
    """Sums over all steps, per sequence [b] int64: tokens chosen, heads that chose, steps in which any did."""

    chosen: Tensor
    choices: Tensor
    layer_steps: Tensor


def near_best(scores: Tensor, alpha: float) -> Tensor:
    """Count the scores [Hk, n] of one sequence that are within `alpha` of the best of their head: [Hk]."""
    if suits(scores):
        return count(scores, alpha)
    return (scores >= scores.amax(1, keepdim=True) - alpha).sum(1)


def count_near_best_ref(
    scores: Tensor, heads: Tensor, alpha: float, most: int, wanted: Tensor, tally: NearTally, arrived: Tensor
) -> None:
    """Reference of `count_near_best`: all heads at once."""
    del arrived  # used by the kernel only
    near = (scores >= scores.amax(2, keepdim=True) - alpha).sum(2)  # [b, Hk]
    chose = heads.sum(1)
    found = (near.where(heads, 0).sum(1) // heads.shape[1]).clamp(1, most)
    wanted.copy_(found)
    tally.chosen.add_(found * chose)
    tally.choices.add_(chose)
    tally.layer_steps.add_(chose > 0)


@jit
def _near_kernel(
    scores: tl.tensor,
    heads: tl.tensor,
    near: tl.tensor,
    wanted: tl.tensor,
    chosen: tl.tensor,
    choices: tl.tensor,
    layer_steps: tl.tensor,
    arrived: tl.tensor,
    alpha: tl.tensor,
    most: tl.tensor,
    num_tokens: tl.tensor,
    HK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Count for one KV head; the last program of a sequence sums the counts."""
    pair = tl.program_id(0)
    b = pair // HK
    asked = tl.load(heads + pair)
    count = 0
    if asked != 0:
        row = scores + pair.to(tl.int64) * num_tokens
        best = tl.full([BLOCK_N], float("-inf"), tl.float32)
        for start in range(0, num_tokens, BLOCK_N):
            token = start + tl.arange(0, BLOCK_N)
            best = tl.maximum(best, tl.load(row + token, mask=token < num_tokens, other=float("-inf")))
        least = tl.max(best, axis=0) - alpha
        counts = tl.zeros([BLOCK_N], tl.int32)
        for start in range(0, num_tokens, BLOCK_N):
            token = start + tl.arange(0, BLOCK_N)
            score = tl.load(row + token, mask=token < num_tokens, other=float("-inf"))
            counts += ((score >= least) & (token < num_tokens)).to(tl.int32)
        count = tl.sum(counts, axis=0)
    tl.store(near + pair, count)
    if last_to_arrive(arrived + b, HK):
        h = tl.arange(0, BLOCK_H)
        total = tl.sum(tl.load(near + b * HK + h, mask=h < HK, other=0), axis=0)
        chose = tl.sum((tl.load(heads + b * HK + h, mask=h < HK, other=0) != 0).to(tl.int32), axis=0)
        found = tl.minimum(tl.maximum(total // HK, 1), most)
        # Read before writing: other warps read the same numbers.
        sums = tl.load(chosen + b), tl.load(choices + b), tl.load(layer_steps + b)
        tl.debug_barrier()
        tl.store(wanted + b, found)
        tl.store(chosen + b, sums[0] + (found * chose).to(tl.int64))
        tl.store(choices + b, sums[1] + chose)
        tl.store(layer_steps + b, sums[2] + (chose > 0).to(tl.int64))


def count_near_best(
    scores: Tensor, heads: Tensor, alpha: float, most: int, wanted: Tensor, tally: NearTally, arrived: Tensor
) -> None:
    """Write to `wanted` how many tokens every KV head of a sequence is to choose, and update `tally`.

    heads [b, Hk] bool: other heads neither count nor choose, and their scores are not read. `arrived` [b] int32 are
    zeros, as `PagedKV.arrived` for the heads. Can be captured in a CUDA graph.

    Raises ValueError for shapes or dtypes that the kernel cannot read.
    """
    b, num_kv_heads, num_tokens = scores.shape
    require_whole("scores", scores, scores.shape, scores.dtype)
    require_whole("heads", heads, (b, num_kv_heads), torch.bool)
    for name, x, dtype in (("wanted", wanted, torch.int32), ("arrived", arrived, torch.int32)):
        require_whole(name, x, (b,), dtype)
    for name, x in zip(tally._fields, tally, strict=True):
        require_whole(name, x, (b,), torch.int64)
    if not takes(scores):
        return count_near_best_ref(scores, heads, alpha, most, wanted, tally, arrived)
    near = torch.empty(b, num_kv_heads, dtype=torch.int32, device=scores.device)
    launch(
        _near_kernel,
        (b * num_kv_heads,),
        *(scores, heads, near, wanted, *tally, arrived, alpha, most, num_tokens),
        HK=num_kv_heads,
        BLOCK_H=power_of_two(num_kv_heads),
        BLOCK_N=min(BLOCK, power_of_two(num_tokens)),
        warps=16 if num_tokens >= BLOCK else 4,
    )
    return None
