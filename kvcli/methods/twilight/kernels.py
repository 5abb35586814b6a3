"""Kernels of Twilight: keep the fewest tokens of chosen pages that hold a part of the attention (section 4).

Weights are the softmax of estimated scores over all tokens of the slots, for each query head; those of sink and window
are kept in any case and count first. A KV head keeps what any of its query heads keeps.

Shapes: q [b, H, d], codes and ranges of all tokens, rows with the chosen pages as `resident` -> kept [b, Hk, slots * p]
bool.

On the device, the rows of each query head are scored in blocks, one program each. The last of them to finish finds
which rows the head keeps; the last query head of a KV head merges what all of them keep. A program reads weights as
integers of the same order. It finds the largest threshold from which on the weights hold the part, digit by digit of
three bits; everything above it is kept, and of what equals it the lowest rows. Wider digits would need fewer passes,
but every value of a digit needs a sum of its own: a histogram of weights would be made of atomic additions, whose order
differs from run to run.

Scores are estimated from keys in four bits per channel, by each token's least and greatest channel:

    z = min      s = (max - min) / 15      code = round((k - z) / s)      k ~ code * s + z
    q . k_t ~ s_t * sum_c q_c code_tc + z_t * sum_c q_c

Shapes: keys [Hk, n, d] -> codes [Hk, n, ceil(d / 2)] uint8, byte j of channel j in its low half and of channel j +
ceil(d / 2) in its high half; ranges [Hk, n, 2], s and z in the dtype of the keys, in which the codes were computed. The
function for a batch on the device has the batch in front.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from kvcli.kernels._numba import compiled, in_order, prange, run, run_alone, serial, serves
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
from kvcli.kernels.page_table import PagedKV, page_in_slot, row_positions
from kvcli.kernels.softmax import Softmax, capped

PIECE = 256  # tokens per thread at once
LEVELS = 15  # steps between a token's least and greatest channel


@cache
def _loop(d: int, group: int) -> Any:
    """Make the loop for a head size and a number of queries; see `gemv` for what it may close over."""
    size = (d + 1) // 2

    @compiled
    def four_bit_scores_cpu(q: Any, codes: Any, ranges: Any, tokens: Any, out: Any) -> None:
        heads, n = tokens.shape
        pieces = (n + PIECE - 1) // PIECE
        for piece in prange(heads * pieces):
            h, first = piece // pieces, piece % pieces * PIECE
            key, whole = np.zeros(2 * size, np.float32), np.zeros(group, np.float32)
            for g in range(group):
                for c in range(d):
                    whole[g] += q[h, g, c]
            for i in range(first, min(first + PIECE, n)):
                code = codes[h, tokens[h, i]]
                for byte in range(size):
                    key[byte] = np.float32(np.int32(code[byte]) & np.int32(15))
                    key[size + byte] = np.float32(np.int32(code[byte]) >> np.int32(4))
                scale, zero = ranges[h, tokens[h, i], 0], ranges[h, tokens[h, i], 1]
                for g in range(group):
                    picked = np.float32(0)
                    for c in range(d):
                        picked += q[h, g, c] * key[c]
                    out[h, g, i] = picked * scale + whole[g] * zero

    return four_bit_scores_cpu


@serial
def _quantise(keys: Any, smallest: Any, codes: Any, ranges: Any) -> None:
    (heads, n, d), size = keys.shape, codes.shape[2]
    for h in range(heads):
        for i in range(n):
            key, code = keys[h, i], codes[h, i]
            low, high = key[0], key[0]
            for c in range(d):
                low, high = min(low, key[c]), max(high, key[c])
            scale = (high - low) / np.float32(LEVELS)
            ranges[h, i, 0], ranges[h, i, 1] = scale, low
            for c in range(d):
                level = np.uint8(min(np.rint((key[c] - low) / max(scale, smallest)), np.float32(LEVELS)))
                code[c % size] = level if c < size else code[c % size] | level << np.uint8(4)


def four_bit_loops_suit(q: Tensor, codes: Tensor, ranges: Tensor) -> bool:
    """Return whether `four_bit_scores_cpu` can score with these."""
    return serves(q, ranges) and codes.is_contiguous() and ranges.is_contiguous()


def four_bit_scores_cpu(q: Tensor, codes: Tensor, ranges: Tensor, tokens: Tensor) -> Tensor:
    """Score the tokens on the CPU, unscaled; see `four_bit_scores`."""
    out = q.new_empty(*q.shape[:2], tokens.shape[1])
    run(
        _loop(q.shape[2], q.shape[1]),
        tokens.numel() * q.shape[2],
        q.contiguous(),
        codes,
        ranges,
        tokens.contiguous(),
        out,
    )
    return out


def quantise_four_bit_cpu(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a few keys on the CPU: codes and ranges."""
    heads, n, d = keys.shape
    codes, ranges = torch.empty(heads, n, (d + 1) // 2, dtype=torch.uint8), keys.new_empty(heads, n, 2)
    run_alone(_quantise, keys, np.float32(torch.finfo(torch.float32).tiny), codes, ranges)
    return codes, ranges


FEW = 64  # keys of all heads, up to which one loop is faster


def quantise_four_bit(keys: Tensor, among: int = 0) -> tuple[Tensor, Tensor]:
    """Quantise keys [Hk, n, d]: codes and ranges. `among`: how many keys a KV head has in total."""
    if keys.shape[0] * keys.shape[1] <= FEW and serves(keys, numbers=among * keys.shape[0] * keys.shape[2]):
        return quantise_four_bit_cpu(keys)
    low, high = (bound.to(_accumulating(keys)) for bound in torch.aminmax(keys, dim=-1))  # [Hk, n]
    ranges = torch.stack(((high - low) / LEVELS, low), -1).to(keys.dtype)
    scale, zero = ranges.to(low.dtype)[..., None].unbind(2)  # [Hk, n, 1]
    smallest = torch.finfo(low.dtype).tiny  # a token whose channels are all equal: every code is 0
    codes = ((keys - zero) / scale.clamp_min(smallest)).round().clamp(0, LEVELS).to(torch.uint8)
    first, second = pad(codes, (0, keys.shape[-1] % 2)).chunk(2, -1)
    return first | (second << 4), ranges


def four_bit_scores(q: Tensor, codes: Tensor, ranges: Tensor) -> Tensor:
    """Score tokens: q [Hk, G, d], codes [Hk, n, bytes], ranges [Hk, n, 2] -> [Hk, G, n] in at least fp32, unscaled."""
    q = q.to(_accumulating(q))
    first, second = pad(q, (0, q.shape[-1] % 2)).chunk(2, -1)  # [Hk, G, bytes]
    low, high = (half.to(q.dtype).transpose(1, 2) for half in (codes & LEVELS, codes >> 4))
    scale, zero = ranges.to(q.dtype)[:, None].unbind(-1)  # [Hk, 1, n]
    return (first @ low + second @ high) * scale + q.sum(-1, keepdim=True) * zero


def _accumulating(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)


def quantise_newest_ref(k: Tensor, lengths: Tensor, codes: Tensor, ranges: Tensor) -> None:
    """Reference of `quantise_newest`: sequence by sequence."""
    for b, length in enumerate(lengths.tolist()):
        if length:
            own = quantise_four_bit(k[b][:, None])  # [Hk, 1, ...]
            codes[b, :, length - 1], ranges[b, :, length - 1] = (x[:, 0] for x in own)


@jit
def _newest_kernel(
    k: tl.tensor,
    lengths: tl.tensor,
    codes: tl.tensor,
    ranges: tl.tensor,
    k_batch: tl.tensor,
    k_head: tl.tensor,
    num_tokens: tl.tensor,
    HK: tl.constexpr,
    D: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK_Y: tl.constexpr,
) -> None:
    pair = tl.program_id(0)  # a KV head of a sequence
    length = tl.load(lengths + pair // HK)
    if length == 0:
        return
    row = pair.to(tl.int64) * num_tokens + length - 1
    k += (pair // HK).to(tl.int64) * k_batch + (pair % HK).to(tl.int64) * k_head
    j = tl.arange(0, BLOCK_Y)
    first, second = j < BYTES, (j < BYTES) & (BYTES + j < D)
    one = tl.load(k + j, mask=first, other=0.0).to(tl.float32)
    other = tl.load(k + BYTES + j, mask=second, other=0.0).to(tl.float32)
    infinity = float("inf")
    least = tl.minimum(
        tl.min(tl.where(first, one, infinity), axis=0), tl.min(tl.where(second, other, infinity), axis=0)
    )
    most = tl.maximum(
        tl.max(tl.where(first, one, -infinity), axis=0), tl.max(tl.where(second, other, -infinity), axis=0)
    )
    step = ((most - least) / 15.0).to(ranges.dtype.element_ty)  # as stored
    zero = least.to(ranges.dtype.element_ty)
    tl.store(ranges + row * 2, step)
    tl.store(ranges + row * 2 + 1, zero)
    step, zero = tl.maximum(step.to(tl.float32), 1.1754943508222875e-38), zero.to(tl.float32)
    # Adding and subtracting 1.5 * 2^23 rounds to whole numbers, half to even, as torch does.
    one = tl.minimum(tl.maximum(((one - zero) / step + 12582912.0) - 12582912.0, 0.0), 15.0).to(tl.int32)
    other = tl.minimum(tl.maximum(((other - zero) / step + 12582912.0) - 12582912.0, 0.0), 15.0).to(tl.int32)
    tl.store(codes + row * BYTES + j, (one | (tl.where(second, other, 0) << 4)).to(tl.uint8), mask=first)


def quantise_newest(k: Tensor, lengths: Tensor, codes: Tensor, ranges: Tensor) -> None:
    """Quantise the newest keys k [b, Hk, d] to their place in codes [b, Hk, n, bytes] and ranges [b, Hk, n, 2].

    lengths [b] int32 include the newest token; a sequence of length 0 has none. Can be captured in a CUDA graph. Raises
    ValueError for shapes, dtypes or strides that the kernel cannot read.
    """
    (b, num_kv_heads, d), (_, _, num_tokens, size) = k.shape, codes.shape
    require("k", k, k.shape)
    require_whole("lengths", lengths, (b,), torch.int32)
    require_whole("codes", codes, (b, num_kv_heads, num_tokens, -(-d // 2)), torch.uint8)
    require_whole("ranges", ranges, (b, num_kv_heads, num_tokens, 2), k.dtype)
    if not takes(k):
        return quantise_newest_ref(k, lengths, codes, ranges)
    launch(
        _newest_kernel,
        (b * num_kv_heads,),
        *(k, lengths, codes, ranges, *k.stride()[:2], num_tokens),
        HK=num_kv_heads,
        D=d,
        BYTES=size,
        BLOCK_Y=power_of_two(size),
        warps=1,
    )
    return None


@compiled
def _others(weights: Any, always: Any, out: Any) -> None:
    heads, group, n = weights.shape
    for row in prange(heads * group):
        h, g, at = row // group, row % group, 0
        for j in range(n):
            if not always[j]:
                out[h, g, at] = weights[h, g, j]
                at += 1


@in_order
def _keep(weights: Any, always: Any, ranked: Any, p: Any, kept: Any) -> None:
    heads, group, n = weights.shape
    rest = ranked.shape[2]
    for h in prange(heads):
        kept[h] = always
        for g in range(group):
            own, others = weights[h, g], ranked[h, g]
            mass, count = np.float64(0), rest - n  # as torch sums: in double precision, rounded after each addition
            for j in range(n):
                if always[j]:
                    mass += np.float64(own[j])
                    count += np.float32(mass) - own[j] < p
            for i in range(rest - 1, -1, -1):
                mass += np.float64(others[i])
                count += np.float32(mass) - others[i] < p
            if count <= 0:
                continue
            least, room = others[rest - count], count  # places left for weights equal to the least
            for i in range(rest - 1, rest - count, -1):
                room -= others[i] > least
            for j in range(n):
                if not always[j]:
                    equal = own[j] == least
                    kept[h, j] |= (own[j] > least) | (equal & (room > 0))
                    room -= equal


@compiled
def _kept_first(tokens: Any, kept: Any, out: Any, valid: Any) -> None:
    heads, n = tokens.shape
    for h in prange(heads):
        at = 0
        for wanted in (True, False):
            for j in range(n):
                if kept[h, j] == wanted and at < out.shape[1]:
                    out[h, at], valid[h, at] = tokens[h, j], wanted
                    at += 1


def keep_nucleus_cpu(weights: Tensor, always: Tensor, p: float) -> Tensor:
    """Flag what `nucleus` keeps for any query head of a KV head, by CPU loops where they serve."""
    if p >= 1 or not serves(weights):
        return nucleus(weights, always, p).any(1)
    kept = torch.empty(weights.shape[0], weights.shape[2], dtype=torch.bool)
    ranked = weights.new_empty(*weights.shape[:2], len(always) - int(always.sum()))
    run(_others, weights.numel(), weights.contiguous(), always, ranked)
    ranked.numpy().sort(axis=-1)  # numpy sorts with vector instructions
    run(_keep, 4 * weights.numel(), weights.contiguous(), always, ranked, np.float32(p), kept)
    return kept


def kept_first_cpu(tokens: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """List the kept tokens, padded with others to equal lengths."""
    most = int(kept.sum(1).max())
    if not serves(tokens, dtype=torch.int64, numbers=2 * tokens.numel()):
        first = kept.int().argsort(dim=1, descending=True, stable=True)[:, :most]
        return tokens.gather(1, first), kept.gather(1, first)
    out, valid = (torch.empty(len(tokens), most, dtype=dtype) for dtype in (torch.int64, torch.bool))
    run(_kept_first, 2 * tokens.numel(), tokens, kept, out, valid)
    return out, valid


@jit
def _weights(scores: tl.tensor, row: tl.tensor, num_rows: tl.tensor, highest: tl.tensor) -> tl.tensor:
    """Read scores and turn them into weights relative to the largest."""
    return tl.exp(tl.load(scores + row, mask=row < num_rows, other=float("-inf")) - highest)


@jit
def keep_most(
    scores: tl.tensor,
    kept: tl.tensor,
    num_rows: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    part: tl.tensor,
    BLOCK_W: tl.constexpr,
) -> None:
    """Flag for one query head the rows begin .. end that are kept, and all other rows that hold a token."""
    highest = tl.full([BLOCK_W], float("-inf"), tl.float32)
    for start in range(0, num_rows, BLOCK_W):
        i = start + tl.arange(0, BLOCK_W)
        highest = tl.maximum(highest, tl.load(scores + i, mask=i < num_rows, other=float("-inf")))
    top = tl.max(highest, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    norm = tl.zeros([BLOCK_W], tl.float32)
    fixed = tl.zeros([BLOCK_W], tl.float32)
    for start in range(0, num_rows, BLOCK_W):
        i = start + tl.arange(0, BLOCK_W)
        weight = _weights(scores, i, num_rows, top)
        norm += weight
        fixed += tl.where((i < begin) | (i >= end), weight, 0.0)
    wanted = part * tl.sum(norm, axis=0) - tl.sum(fixed, axis=0)  # of rows begin .. end, relative to the largest weight
    trials = tl.arange(0, 8)
    threshold = 0  # bits of a weight: at most thirty, since no weight exceeds one
    for digit in range(10):
        shift = 27 - 3 * digit
        trial = threshold | (trials << shift)
        mass = tl.zeros([8, BLOCK_W // 4], tl.float32)  # of the weights that reach each trial
        for start in range(begin, end, BLOCK_W // 4):
            i = start + tl.arange(0, BLOCK_W // 4)
            weight = tl.where(i < end, _weights(scores, i, num_rows, top), 0.0)
            reaches = weight.to(tl.int32, bitcast=True)[None, :] >= trial[:, None]
            mass += tl.where(reaches, weight[None, :], 0.0)
        enough = (trials > 0) & (tl.sum(mass, axis=1) >= wanted)  # a prefix: fewer weights reach a higher trial
        threshold |= tl.sum(enough.to(tl.int32), axis=0) << shift
    above = tl.zeros([BLOCK_W], tl.float32)
    for start in range(begin, end, BLOCK_W):
        i = start + tl.arange(0, BLOCK_W)
        weight = _weights(scores, i, num_rows, top)
        above += tl.where((i < end) & (weight.to(tl.int32, bitcast=True) > threshold), weight, 0.0)
    left, equal = wanted - tl.sum(above, axis=0), 0
    for start in range(0, num_rows, BLOCK_W):
        i = start + tl.arange(0, BLOCK_W)
        weight = _weights(scores, i, num_rows, top)
        bits = weight.to(tl.int32, bitcast=True)
        always = (i < begin) | (i >= end)
        tie = ((always == 0) & (bits == threshold) & (i < num_rows)).to(tl.int32)
        before = (equal + tl.cumsum(tie, axis=0) - tie).to(tl.float32) * weight
        keeps = always | (bits > threshold) | ((tie == 1) & (before < left)) | (part >= 1.0)
        keeps = keeps & (tl.load(scores + i, mask=i < num_rows, other=float("-inf")) > float("-inf"))
        tl.store(kept + i, keeps, mask=i < num_rows)
        equal += tl.sum(tie, axis=0)


BLOCK_N = 128  # rows scored per program
BLOCK_Y = 64  # bytes of a row multiplied at once
BLOCK_W = 2048  # weights, and flags of a KV head, that a last program handles at once


class NucleusTally(NamedTuple):
    """Counts of choices so far, per sequence [b] int64.

    KV heads that chose (`selections`), tokens that they weighed and kept, and the fewest and most that one of them
    kept.
    """

    selections: Tensor
    weighed: Tensor
    kept: Tensor
    fewest: Tensor
    most: Tensor


def nucleus(weights: Tensor, always: Tensor, p: float) -> Tensor:
    """Flag the fewest tokens that hold the part `p` of each row's attention, including those of `always` [n] bool.

    Weights [..., n], each row with sum 1 -> bool [..., n]. Ties go to the lower index; p = 1 keeps all tokens, whatever
    the sum rounds to.
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
    """Sort rows in descending order; on a CPU numpy is up to twenty times as fast as torch."""
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
    """Reference of `keep_nucleus`: all sequences at once."""
    del arrived  # used by the kernel only
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
                score = tl.load(own + i, mask=i < num_rows, other=float("-inf"))  # the same rows for every query head
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
    """Write to `kept` which rows are attended to, and count; KV heads not flagged in `heads` [b, Hk] keep all.

    `arrived` [b, H] int32 are zeros, as `PagedKV.arrived` for the KV heads. Can be captured in a CUDA graph. Raises
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
