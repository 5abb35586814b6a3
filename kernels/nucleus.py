"""The fewest tokens of chosen pages that hold a part of the attention, by keys of four bits (Twilight, section 4).

Weights are the softmax of estimated scores over all tokens of the slots, for each query head; those of sink and window
are kept in any case and count first. A KV head keeps what any of its query heads keeps.

On the device blocks of rows are scored by as many programs for each query head, and the last of them to finish finds
which ones it keeps (`kvcli.kernels.keep_most`); the last query head of a KV head puts together what all of them keep.

Shapes: q [b, H, d], codes and ranges as in `kvcli.kernels.four_bit_keys` of all tokens, rows with the chosen pages as
`resident` -> kept [b, Hk, slots * p] bool.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvcli.kernels._triton import (
    jit,
    last_to_arrive,
    launch,
    power_of_two,
    require,
    require_whole,
    rows_at_once,
    takes,
    tl,
)
from kvcli.kernels.four_bit_keys import four_bit_scores
from kvcli.kernels.keep_most import keep_most
from kvcli.kernels.page_table import PagedKV, page_in_slot, row_positions
from kvcli.kernels.softmax import Softmax, capped

BLOCK_N = 128  # rows that a program scores
BLOCK_Y = 64  # bytes of a row that it multiplies at once
BLOCK_W = 2048  # weights that the last one looks at together, and flags of the last of a KV head


class NucleusTally(NamedTuple):
    """What choices have kept so far, of every sequence [b] int64: KV heads that chose, tokens that they weighed and
    kept, the fewest and the most that one of them kept.
    """

    selections: Tensor
    weighed: Tensor
    kept: Tensor
    fewest: Tensor
    most: Tensor


def nucleus(weights: Tensor, always: Tensor, p: float) -> Tensor:
    """Flag the fewest tokens that hold the part `p` of each row's attention, those of `always` [n] bool among them.

    Weights [..., n], each row of sum 1 -> bool [..., n]. Of equal weights the lower index goes first; p = 1 keeps all
    tokens, whatever the sum rounds to.
    """
    if p >= 1:
        return torch.ones_like(weights, dtype=torch.bool)
    rest = weights[..., ~always]
    ranked = torch.cat((weights[..., always], _descending(rest)), -1)
    before = ranked.cumsum(-1) - ranked  # the mass of those that rank higher
    count = (before < p).sum(-1, keepdim=True) - always.sum()  # of the rest
    least = ranked.gather(-1, (count + always.sum() - 1).clamp_min(0))
    above, equal = rest > least, rest == least
    room = count - above.sum(-1, keepdim=True)
    if (equal.sum(-1, keepdim=True) > room).any():
        equal &= equal.cumsum(-1) <= room
    kept = torch.ones_like(weights, dtype=torch.bool)
    kept[..., ~always] = (above | equal) & (count > 0)
    return kept


def _descending(x: Tensor) -> Tensor:
    """Sort rows; numpy sorts numbers on a CPU up to twenty times as fast as torch."""
    if x.device.type != "cpu":
        return x.sort(-1, descending=True).values
    return torch.from_numpy(np.sort(x.numpy(), axis=-1)).flip(-1)


def keep_nucleus_ref(
    q: Tensor,
    rows: PagedKV,
    codes: Tensor,
    ranges: Tensor,
    softmax: Softmax,
    p: float,
    heads: Tensor,
    kept: Tensor,
    tally: NucleusTally,
    arrived: Tensor,
) -> None:
    """All sequences at once."""
    del arrived  # of the kernel
    layout = rows.layout
    slot = torch.arange(kept.shape[2], device=q.device) // layout.size
    always = (slot < layout.sink) | (slot >= layout.first)
    positions = row_positions(rows.lengths, layout, rows.resident).expand(kept.shape)
    there, token = positions >= 0, positions.clamp_min(0).long()[..., None]
    own = (x.gather(2, token.expand(-1, -1, -1, x.shape[3])).flatten(0, 1) for x in (codes, ranges))
    queries = q.to(torch.promote_types(q.dtype, torch.float32)).view(codes.shape[0] * codes.shape[1], -1, q.shape[2])
    scores = softmax.scores(four_bit_scores(queries, *own)).masked_fill(~there.flatten(0, 1)[:, None], float("-inf"))
    found = nucleus(scores.softmax(-1), always, p).any(1).view(there.shape)
    kept.copy_((found | ~heads[..., None]) & there)
    of_head = kept.sum(2) * heads  # [b, Hk]
    tally.selections.add_(heads.sum(1))
    tally.weighed.add_((there & heads[..., None]).sum((1, 2)))
    tally.kept.add_(of_head.sum(1))
    fewest = of_head.masked_fill(~heads, torch.iinfo(torch.int64).max).amin(1)
    torch.minimum(tally.fewest, fewest, out=tally.fewest)
    torch.maximum(tally.most, of_head.amax(1), out=tally.most)


@jit
def _nucleus_kernel(
    q: tl.tensor,
    codes: tl.tensor,
    ranges: tl.tensor,
    lengths: tl.tensor,
    resident: tl.tensor,
    heads: tl.tensor,
    scores: tl.tensor,
    kept_by: tl.tensor,
    kept: tl.tensor,
    selections: tl.tensor,
    weighed: tl.tensor,
    kept_so_far: tl.tensor,
    fewest: tl.tensor,
    most: tl.tensor,
    arrived: tl.tensor,
    finished: tl.tensor,
    q_batch: tl.tensor,
    q_head: tl.tensor,
    num_tokens: tl.tensor,
    num_rows: tl.tensor,
    sink: tl.tensor,
    first: tl.tensor,
    ring: tl.tensor,
    window: tl.tensor,
    low: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    part: tl.tensor,
    HK: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BYTES: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Y: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    head = tl.program_id(0)  # a query head of a sequence
    pair = head // G  # its KV head
    b = (pair // HK).to(tl.int64)
    length = tl.load(lengths + b)
    newest_page = (length - 1) // SIZE
    resident += pair.to(tl.int64) * (first - sink)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    page = page_in_slot(row // SIZE, newest_page, resident, sink, first, ring, window, low, 1)
    position = page * SIZE + row % SIZE
    there = (row < num_rows) & (position >= 0) & (position < length)
    if tl.load(heads + pair) == 0:
        if head % G == 0:
            tl.store(kept + pair.to(tl.int64) * num_rows + row, there, mask=row < num_rows)
        return
    token = pair.to(tl.int64) * num_tokens + position
    q += b * q_batch + (head - b * (HK * G)) * q_head
    products = tl.zeros([BLOCK_N], tl.float32)
    in_all = tl.zeros([BLOCK_Y], tl.float32)  # the sum of the query
    for byte in tl.static_range(0, BYTES, BLOCK_Y):
        j = byte + tl.arange(0, BLOCK_Y)
        one = tl.load(q + j, mask=j < BYTES, other=0.0).to(tl.float32)
        other = tl.load(q + BYTES + j, mask=(j < BYTES) & (BYTES + j < D), other=0.0).to(tl.float32)
        coded = there[:, None] & (j < BYTES)[None, :]
        packed = tl.load(codes + token[:, None] * BYTES + j[None, :], mask=coded, other=0).to(tl.int32)
        lower, upper = (packed & 15).to(tl.float32), (packed >> 4).to(tl.float32)
        products += tl.sum(one[None, :] * lower + other[None, :] * upper, axis=1)
        in_all += one + other
    step = tl.load(ranges + token * 2, mask=there, other=0.0).to(tl.float32)
    zero = tl.load(ranges + token * 2 + 1, mask=there, other=0.0).to(tl.float32)
    found = capped((products * step + tl.sum(in_all, axis=0) * zero) * scale, softcap)
    own = scores + head.to(tl.int64) * num_rows
    tl.store(own + row, tl.where(there, found, float("-inf")), mask=row < num_rows)
    if last_to_arrive(arrived + head, BLOCKS):
        keep_most(own, kept_by + head.to(tl.int64) * num_rows, num_rows, sink * SIZE, first * SIZE, part, BLOCK_W)
        if last_to_arrive(finished + pair, G):
            g = tl.arange(0, BLOCK_G)
            count = tl.zeros([BLOCK_K], tl.int32)
            of_all = tl.zeros([BLOCK_K], tl.int32)
            for start in range(0, num_rows, BLOCK_K):
                i = start + tl.arange(0, BLOCK_K)
                flags = kept_by + (pair.to(tl.int64) * G + g)[:, None] * num_rows + i[None, :]
                keeps = tl.load(flags, mask=(g < G)[:, None] & (i < num_rows)[None, :], other=0).to(tl.int32)
                keeps = tl.max(keeps, axis=0)
                tl.store(kept + pair.to(tl.int64) * num_rows + i, keeps != 0, mask=i < num_rows)
                count += keeps
                score = tl.load(own + i, mask=i < num_rows, other=float("-inf"))  # any query head's says the same
                of_all += (score > float("-inf")).to(tl.int32)
            num_kept = tl.sum(count, axis=0).to(tl.int64)
            tl.atomic_add(selections + b, 1)
            tl.atomic_add(weighed + b, tl.sum(of_all, axis=0).to(tl.int64))
            tl.atomic_add(kept_so_far + b, num_kept)
            tl.atomic_min(fewest + b, num_kept)
            tl.atomic_max(most + b, num_kept)


def keep_nucleus(
    q: Tensor,
    rows: PagedKV,
    codes: Tensor,
    ranges: Tensor,
    softmax: Softmax,
    p: float,
    heads: Tensor,
    kept: Tensor,
    tally: NucleusTally,
    arrived: Tensor,
) -> None:
    """Write to `kept` which rows are attended to, and count; KV heads that `heads` [b, Hk] does not flag keep all.

    `arrived` [b, H] int32 are zeros, as `PagedKV.arrived` are for the KV heads. May be captured in a CUDA graph. Raises
    ValueError for shapes, dtypes or strides that the kernel cannot read.
    """
    (b, num_heads, d), (_, num_kv_heads, num_tokens, size), layout = q.shape, codes.shape, rows.layout
    rows.check()
    require("q", q, q.shape)
    require_whole("codes", codes, codes.shape, torch.uint8)
    require_whole("ranges", ranges, (b, num_kv_heads, num_tokens, 2))
    require_whole("heads", heads, (b, num_kv_heads), torch.bool)
    require_whole("kept", kept, (b, num_kv_heads, layout.total * layout.size), torch.bool)
    for name, x in zip(tally._fields, tally, strict=True):
        require_whole(name, x, (b,), torch.int64)
    require_whole("arrived", arrived, (b, num_heads), torch.int32)
    if not takes(q):
        return keep_nucleus_ref(q, rows, codes, ranges, softmax, p, heads, kept, tally, arrived)
    groups, num_rows = num_heads // num_kv_heads, kept.shape[2]
    blocks, block_g, row_block = -(-num_rows // BLOCK_N), power_of_two(groups), power_of_two(num_rows)
    scores = torch.empty(b, num_heads, num_rows, dtype=torch.float32, device=q.device)
    kept_by = torch.empty(b, num_heads, num_rows, dtype=torch.bool, device=q.device)
    launch(
        _nucleus_kernel,
        (b * num_heads, blocks),
        *(q, codes, ranges, rows.lengths, rows.resident, heads, scores, kept_by, kept, *tally, arrived, rows.counts()),
        *(*q.stride()[:2], num_tokens, num_rows, layout.sink, layout.first, layout.ring, layout.window, layout.low),
        *(softmax.scale, softmax.softcap, p),
        HK=num_kv_heads,
        G=groups,
        D=d,
        BYTES=size,
        SIZE=layout.size,
        BLOCKS=blocks,
        BLOCK_G=block_g,
        BLOCK_N=BLOCK_N,
        BLOCK_Y=min(BLOCK_Y, power_of_two(size)),
        BLOCK_W=max(16, min(BLOCK_W, row_block)),
        BLOCK_K=rows_at_once(num_rows, block_g, BLOCK_W),
        warps=4,
    )
    return None
