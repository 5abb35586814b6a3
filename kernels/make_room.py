"""The row of every KV head that the newest token takes in a layer that holds a fixed number of them (H2O, TOVA).

As long as there is room it is the next one; then that of the lowest score, of equals the newest, among tokens that are
not of the `recent` newest.

Shapes: positions [b, Hk, rows] int64 and scores fp32, seen [b] int32 with the newest token, and most [b], the rows of
each sequence -> at [b, Hk] int32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels._triton import jit, launch, power_of_two, require_whole, takes, tl

BLOCK = 1024


def make_room_ref(positions: Tensor, scores: Tensor, seen: Tensor, most: Tensor, recent: int, at: Tensor) -> None:
    """All KV heads at once."""
    row, newest = torch.arange(scores.shape[2], device=scores.device), seen - 1  # newest [b], its position
    evictable = positions <= (newest - recent)[:, None, None]
    evictable &= row < most[:, None, None]
    open_scores = scores.where(evictable, torch.inf)
    least = evictable & (open_scores == open_scores.amin(2, keepdim=True))
    lowest = positions.where(least, -1).argmax(2)  # [b, Hk]
    at.copy_(newest[:, None].where((seen <= most)[:, None], lowest).clamp_min(0))
    mine = (row == at[..., None]) & (newest >= 0)[:, None, None]
    positions.copy_(newest[:, None, None].where(mine, positions))
    scores.masked_fill_(mine, 0)


@jit
def _room_kernel(
    positions: tl.tensor,
    scores: tl.tensor,
    seen: tl.tensor,
    most: tl.tensor,
    at: tl.tensor,
    recent: tl.tensor,
    num_rows: tl.tensor,
    HK: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    pair = tl.program_id(0)  # a KV head of a sequence
    length, rows = tl.load(seen + pair // HK), tl.load(most + pair // HK).to(tl.int32)
    newest = length - 1
    if length == 0:
        tl.store(at + pair, 0)
        return
    positions += pair.to(tl.int64) * num_rows
    scores += pair.to(tl.int64) * num_rows
    row = newest
    if length > rows:
        least = tl.full([BLOCK_N], float("inf"), tl.float32)
        for start in range(0, rows, BLOCK_N):
            i = start + tl.arange(0, BLOCK_N)
            position = tl.load(positions + i, mask=i < rows, other=newest)
            score = tl.load(scores + i, mask=i < rows, other=float("inf"))
            least = tl.minimum(least, tl.where((i < rows) & (position <= newest - recent), score, float("inf")))
        lowest = tl.min(least, axis=0)
        latest = tl.full([BLOCK_N], -1, tl.int64)
        found = tl.zeros([BLOCK_N], tl.int32)
        for start in range(0, rows, BLOCK_N):
            i = start + tl.arange(0, BLOCK_N)
            position = tl.load(positions + i, mask=i < rows, other=newest)
            score = tl.load(scores + i, mask=i < rows, other=float("inf"))
            better = (i < rows) & (position <= newest - recent) & (score == lowest) & (position > latest)
            latest, found = tl.where(better, position, latest), tl.where(better, i, found)
        row = tl.min(tl.where(latest == tl.max(latest, axis=0), found, num_rows), axis=0)
        tl.debug_barrier()  # all threads have read before one writes
    tl.store(positions + row, newest.to(tl.int64))
    tl.store(scores + row, 0.0)
    tl.store(at + pair, row)


def make_room(positions: Tensor, scores: Tensor, seen: Tensor, most: Tensor, recent: int, at: Tensor) -> None:
    """Write the row of the newest token of every KV head to `at`, with its position and a score of zero in that row.

    May be captured in a CUDA graph. Raises ValueError for shapes or dtypes that the kernel cannot read.
    """
    b, num_kv_heads, num_rows = scores.shape
    require_whole("positions", positions, scores.shape, torch.int64)
    require_whole("scores", scores, scores.shape, torch.float32)
    require_whole("seen", seen, (b,), torch.int32)
    require_whole("most", most, (b,))
    require_whole("at", at, (b, num_kv_heads), torch.int32)
    if not takes(scores):
        return make_room_ref(positions, scores, seen, most, recent, at)
    launch(
        _room_kernel,
        (b * num_kv_heads,),
        *(positions, scores, seen, most, at, recent, num_rows),
        HK=num_kv_heads,
        BLOCK_N=min(BLOCK, power_of_two(num_rows)),
    )
    return None
