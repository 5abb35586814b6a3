"""The fewest tokens of chosen pages that hold a part of the attention, by keys of four bits (Twilight, section 4).

Weights are the softmax of estimated scores over all tokens of the slots, for each query head; those of sink and window
are kept in any case and count first. A KV head keeps what any of its query heads keeps.

On the device blocks of rows are scored by as many programs; the last of a KV head to finish finds for every query head
the largest weight from which on all reach the part, bit by bit.

Shapes: q [b, H, d], codes and ranges as in `kvcli.kernels.four_bit_keys` of all tokens, rows with the chosen pages as
`resident` -> kept [b, Hk, slots * p] bool.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvcli.kernels._triton import jit, last_to_arrive, launch, power_of_two, require, require_whole, takes, tl
from kvcli.kernels.four_bit_keys import four_bit_scores
from kvcli.kernels.slot_layout import PagedKV, page_in_slot, row_positions
from kvcli.kernels.softmax import Softmax, capped

BLOCK_N = 64  # rows that a program scores
BLOCK_Y = 64  # bytes of a row that it multiplies at once
BLOCK_W = 2048  # weights that the last one looks at together


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
) -> None:
    """All sequences at once."""
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
def _weights(scores: tl.tensor, row: tl.tensor, num_rows: tl.tensor, highest: tl.tensor) -> tl.tensor:
    """Read scores and make weights of them that the largest one measures."""
    return tl.exp(tl.load(scores + row, mask=row < num_rows, other=float("-inf")) - highest)


@jit
def _nucleus_kernel(
    q: tl.tensor,
    codes: tl.tensor,
    ranges: tl.tensor,
    lengths: tl.tensor,
    resident: tl.tensor,
    heads: tl.tensor,
    scores: tl.tensor,
    kept: tl.tensor,
    selections: tl.tensor,
    weighed: tl.tensor,
    kept_so_far: tl.tensor,
    fewest: tl.tensor,
    most: tl.tensor,
    arrived: tl.tensor,
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
    PRECISION: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Y: tl.constexpr,
    BLOCK_W: tl.constexpr,
) -> None:
    pair = tl.program_id(0)  # a KV head of a sequence
    b, h = (pair // HK).to(tl.int64), (pair % HK).to(tl.int64)
    length = tl.load(lengths + b)
    newest_page = (length - 1) // SIZE
    resident += pair.to(tl.int64) * (first - sink)
    kept += pair.to(tl.int64) * num_rows
    scores += pair.to(tl.int64) * G * num_rows
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    page = page_in_slot(row // SIZE, newest_page, resident, sink, first, ring, window, low, 1)
    position = page * SIZE + row % SIZE
    there = (row < num_rows) & (position >= 0) & (position < length)
    if tl.load(heads + pair) == 0:
        tl.store(kept + row, there, mask=row < num_rows)
        return
    g = tl.arange(0, BLOCK_G)
    token = pair.to(tl.int64) * num_tokens + position
    products = tl.zeros([BLOCK_G, BLOCK_N], tl.float32)
    in_all = tl.zeros([BLOCK_G], tl.float32)  # the sum of a query
    for begin in tl.static_range(0, BYTES, BLOCK_Y):
        j = begin + tl.arange(0, BLOCK_Y)
        queries = q + b * q_batch + (h * G + g)[:, None] * q_head + j[None, :]
        own = (g < G)[:, None] & (j < BYTES)[None, :]
        one = tl.load(queries, mask=own, other=0.0).to(tl.float32)
        other = tl.load(queries + BYTES, mask=own & (BYTES + j < D)[None, :], other=0.0).to(tl.float32)
        coded = there[:, None] & (j < BYTES)[None, :]
        packed = tl.load(codes + token[:, None] * BYTES + j[None, :], mask=coded, other=0).to(tl.int32)
        products += tl.dot(one, tl.trans((packed & 15).to(tl.float32)), input_precision=PRECISION)
        products += tl.dot(other, tl.trans((packed >> 4).to(tl.float32)), input_precision=PRECISION)
        in_all += tl.sum(one, axis=1) + tl.sum(other, axis=1)
    step = tl.load(ranges + token * 2, mask=there, other=0.0).to(tl.float32)
    zero = tl.load(ranges + token * 2 + 1, mask=there, other=0.0).to(tl.float32)
    found = capped((products * step[None, :] + in_all[:, None] * zero[None, :]) * scale, softcap)
    found = tl.where(there[None, :], found, float("-inf"))
    tl.store(scores + g[:, None] * num_rows + row[None, :], found, mask=(g < G)[:, None] & (row < num_rows)[None, :])
    if last_to_arrive(arrived + pair, BLOCKS):
        count, of_all = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
        for head in range(G):
            own_scores = scores + head * num_rows
            highest = tl.full([BLOCK_W], float("-inf"), tl.float32)
            for start in range(0, num_rows, BLOCK_W):
                i = start + tl.arange(0, BLOCK_W)
                highest = tl.maximum(highest, tl.load(own_scores + i, mask=i < num_rows, other=float("-inf")))
            top = tl.max(highest, axis=0)
            top = tl.where(top == float("-inf"), 0.0, top)
            norm = tl.zeros([BLOCK_W], tl.float32)
            fixed = tl.zeros([BLOCK_W], tl.float32)
            for start in range(0, num_rows, BLOCK_W):
                i = start + tl.arange(0, BLOCK_W)
                weight = _weights(own_scores, i, num_rows, top)
                norm += weight
                fixed += tl.where((i < sink * SIZE) | (i >= first * SIZE), weight, 0.0)
            norm_sum = tl.sum(norm, axis=0)
            wanted = part * norm_sum - tl.sum(fixed, axis=0)  # of the others, in weights that the largest measures
            threshold = 0
            for bit in range(31):
                trial = threshold | (1 << (30 - bit))
                mass = tl.zeros([BLOCK_W], tl.float32)
                for start in range(0, num_rows, BLOCK_W):
                    i = start + tl.arange(0, BLOCK_W)
                    weight = _weights(own_scores, i, num_rows, top)
                    open = (i >= sink * SIZE) & (i < first * SIZE) & (weight.to(tl.int32, bitcast=True) >= trial)
                    mass += tl.where(open, weight, 0.0)
                threshold = tl.where(tl.sum(mass, axis=0) >= wanted, trial, threshold)
            above = tl.zeros([BLOCK_W], tl.float32)
            for start in range(0, num_rows, BLOCK_W):
                i = start + tl.arange(0, BLOCK_W)
                weight = _weights(own_scores, i, num_rows, top)
                open = (i >= sink * SIZE) & (i < first * SIZE) & (weight.to(tl.int32, bitcast=True) > threshold)
                above += tl.where(open, weight, 0.0)
            left, equal = wanted - tl.sum(above, axis=0), 0
            for start in range(0, num_rows, BLOCK_W):
                i = start + tl.arange(0, BLOCK_W)
                weight = _weights(own_scores, i, num_rows, top)
                bits = weight.to(tl.int32, bitcast=True)
                always = (i < sink * SIZE) | (i >= first * SIZE)
                tie = ((always == 0) & (bits == threshold) & (i < num_rows)).to(tl.int32)
                before = (equal + tl.cumsum(tie, axis=0) - tie).to(tl.float32) * weight
                keeps = always | (bits > threshold) | ((tie == 1) & (before < left)) | (part >= 1.0)
                keeps = keeps & (tl.load(own_scores + i, mask=i < num_rows, other=float("-inf")) > float("-inf"))
                if head > 0:
                    keeps = keeps | (tl.load(kept + i, mask=i < num_rows, other=0) != 0)
                tl.store(kept + i, keeps, mask=i < num_rows)
                equal += tl.sum(tie, axis=0)
                if head == G - 1:
                    count += tl.sum(keeps.to(tl.int64), axis=0)
                    of_all += tl.sum(
                        (tl.load(own_scores + i, mask=i < num_rows, other=float("-inf")) > float("-inf")).to(tl.int64),
                        axis=0,
                    )
            tl.debug_barrier()  # all threads see what this head keeps before the next one adds to it
        tl.atomic_add(selections + b, 1)
        tl.atomic_add(weighed + b, of_all)
        tl.atomic_add(kept_so_far + b, count)
        tl.atomic_min(fewest + b, count)
        tl.atomic_max(most + b, count)


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
) -> None:
    """Write to `kept` which rows are attended to, and count; KV heads that `heads` [b, Hk] does not flag keep all.

    May be captured in a CUDA graph. Raises ValueError for shapes, dtypes or strides that the kernel cannot read.
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
    if not takes(q):
        return keep_nucleus_ref(q, rows, codes, ranges, softmax, p, heads, kept, tally)
    groups, num_rows = num_heads // num_kv_heads, kept.shape[2]
    blocks = -(-num_rows // BLOCK_N)
    scores = torch.empty(b, num_heads, num_rows, dtype=torch.float32, device=q.device)
    launch(
        _nucleus_kernel,
        (b * num_kv_heads, blocks),
        *(q, codes, ranges, rows.lengths, rows.resident, heads, scores, kept, *tally, rows.counts(), *q.stride()[:2]),
        *(num_tokens, num_rows, layout.sink, layout.first, layout.ring, layout.window, layout.low),
        *(softmax.scale, softmax.softcap, p),
        HK=num_kv_heads,
        G=groups,
        D=d,
        BYTES=size,
        SIZE=layout.size,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",  # tf32 holds every bit of the half precisions
        BLOCKS=blocks,
        BLOCK_G=max(16, power_of_two(groups)),
        BLOCK_N=BLOCK_N,
        BLOCK_Y=max(16, min(BLOCK_Y if groups <= 32 else BLOCK_Y // 2, power_of_two(size))),
        BLOCK_W=min(BLOCK_W, power_of_two(num_rows)),
        warps=8,
    )
    return None
