"""Decode attention: one new token attends to the resident keys.

    out_h = sum_j softmax(scale * q_h . k_j)_j v_j

Shapes: q [H, d], k [Hk, n, d], v [Hk, n, d] -> out [H, d]. Query heads h of one KV head are rows h*G .. h*G+G-1.

On a CPU quantised tokens (`kvcli.kernels.quant`) are multiplied without a buffer of all of them in fp32.

    products  s_hgj = q_hg . (z_hj + s_hj code_hj)        every key, for the query rows that share a KV head
    mixtures  o_hg = sum_j w_hgj (z_hj + s_hj code_hj)    every value, weighted

Bytes are read from memory, and dequantised a few tokens at a time in the L1 cache.

Shapes: q [Hk, G, d] fp32, blocks [n, Hk, bytes] uint8 without gaps, one token each, w [Hk, G, n].
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvcli.kernels import chain, gemv
from kvcli.kernels._llvm import AHEAD, at_address, exp, highest, prefetch
from kvcli.kernels._numba import compiled, flat, inlined, prange, run, serves
from kvcli.kernels._triton import same_strides, takes
from kvcli.kernels.block_attention import (
    add_sinks,
    attention_scores,
    block_attention,
    block_attention_ref,
    merge_blocks,
)
from kvcli.kernels.chain import floats
from kvcli.kernels.gemv import FAR, PIECE, TOKENS, apart, dot, dots, heads_side_by_side
from kvcli.kernels.page_table import PagedKV, SlotLayout
from kvcli.kernels.paged_attention import paged_decode_attention
from kvcli.kernels.quant import BlockFormat, PartLayout, numbers_of_halves, read_token
from kvcli.kernels.softmax import Softmax

QUANTISED_PIECE = 512  # tokens per thread at once, for any number of threads


@cache
def _quantised_loops(d: int, part: PartLayout) -> tuple[Any, Any]:
    """Make the loops over rows of d numbers; sizes known at compile time allow vectors of sixteen."""
    form = part.of_token(d)
    columns = form.columns

    @compiled
    def products_quantised_cpu(q: Any, blocks: Any, halves: Any, floats: Any, out: Any) -> None:
        heads, group, n = out.shape
        for piece in prange((n + QUANTISED_PIECE - 1) // QUANTISED_PIECE):
            key, its = np.empty((1, d), np.float32), np.empty((2, columns), np.float32)
            for j in range(piece * QUANTISED_PIECE, min(n, (piece + 1) * QUANTISED_PIECE)):
                for h in range(heads):
                    read_token(blocks, halves, j * heads + h, floats, form, its, key, 0)
                    for g in range(group):
                        total = np.float32(0)
                        for c in range(d):
                            total += q[np.uint64(h), np.uint64(g), np.uint64(c)] * key[0, np.uint64(c)]
                        out[h, g, j] = total

    @compiled
    def mixtures_quantised_cpu(w: Any, blocks: Any, halves: Any, floats: Any, parts: Any) -> None:
        heads, group, n = w.shape
        for piece in prange(len(parts)):
            begin, end = piece * QUANTISED_PIECE, min(n, (piece + 1) * QUANTISED_PIECE)
            values, its = np.zeros((4, d), np.float32), np.empty((2, columns), np.float32)
            parts[piece] = 0
            for j in range(begin, end, 4):
                some = min(4, end - j)
                values[some:] = 0
                for h in range(heads):
                    for i in range(some):
                        read_token(blocks, halves, (j + i) * heads + h, floats, form, its, values, i)
                    for g in range(group):
                        w0 = w[h, g, j]
                        w1 = w[h, g, j + 1] if some > 1 else np.float32(0)
                        w2 = w[h, g, j + 2] if some > 2 else np.float32(0)
                        w3 = w[h, g, j + 3] if some > 3 else np.float32(0)
                        for c in range(d):
                            u = np.uint64(c)
                            parts[np.uint64(piece), np.uint64(h), np.uint64(g), u] += (
                                w0 * values[0, u] + w1 * values[1, u] + w2 * values[2, u] + w3 * values[3, u]
                            )

    return products_quantised_cpu, mixtures_quantised_cpu


def quantised_loops_suit(q: Tensor, blocks: Tensor) -> bool:
    """Return whether these loops serve for queries [Hk, G, d] and the blocks."""
    return (
        q.shape[1] <= gemv.MOST_ROWS
        and serves(blocks, dtype=torch.uint8)
        and q.device.type == "cpu"
        and blocks.is_contiguous()
        and blocks.data_ptr() % 2 == 0
    )


def products_quantised_cpu(q: Tensor, blocks: Tensor, form: BlockFormat) -> Tensor:
    """Score every token: [Hk, G, n]."""
    out = q.new_empty(*q.shape[:2], len(blocks))
    loop, held = _quantised_loop(0, blocks, form)
    run(loop, out[:, 0].numel() * form.d, q.contiguous(), *held, out)
    return out


def mixtures_quantised_cpu(w: Tensor, blocks: Tensor, form: BlockFormat) -> Tensor:
    """Sum the values by weights: [Hk, G, d]."""
    heads, group, n = w.shape
    parts = w.new_empty(-(-n // QUANTISED_PIECE), heads, group, form.d)
    loop, held = _quantised_loop(1, blocks, form)
    run(loop, w[:, 0].numel() * form.d, w.contiguous(), *held, parts)
    return parts.sum(0)


def attend_quantised_cpu(
    q: Tensor, blocks: Tensor, form: BlockFormat, sizes: Tensor, k: Tensor, v: Tensor, softmax: Softmax
) -> tuple[Tensor, Tensor]:
    """Attend to quantised tokens, followed by k, v [Hk, m, d] in fp32; return out [Hk, G, d] and lse [Hk, G].

    The channel sizes [Hk, d] of quantised keys are multiplied into the queries.
    """
    far_scores = products_quantised_cpu(q * sizes[:, None], blocks, form)
    scores = softmax.scores(torch.cat((far_scores, q @ k.transpose(1, 2)), -1))
    top = scores.amax(-1, keepdim=True)
    weights = scores.sub_(top).exp_()
    far, near = weights[..., : len(blocks)], weights[..., len(blocks) :]
    total = weights.sum(-1)
    return (mixtures_quantised_cpu(far, blocks, form) + near @ v) / total[..., None], top[..., 0] + torch.log(total)


def _quantised_loop(part: int, blocks: Tensor, form: BlockFormat) -> tuple[Any, tuple[Any, ...]]:
    """Choose the loop for keys (part 0) or values, with its arguments."""
    layout, rows = form.layouts[part], blocks.flatten(0, 1)
    return _quantised_loops(form.d, layout)[part], (rows, rows.view(torch.uint16), numbers_of_halves())


_NONE = np.float32("-inf")
LINE = 16  # numbers after the d' of a part: its highest score, the sum of weights, and padding to a cache line


class TokenSet(NamedTuple):
    """Tokens that are attended to: all of k and v, or those in `rows` [1 or Hk, n]; only those `valid`, bool [Hk, n].

    `log_counts` [Hk, G or 1, n] are the logarithms of how often each token counts, -inf for never. Without k, q holds
    known scores [Hk, G, n], scaled and capped, of v or its `rows`; they are overwritten by the weights.
    """

    q: Tensor
    k: Tensor | None
    v: Tensor
    rows: Tensor | None = None
    valid: Tensor | None = None
    log_counts: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """KV heads, queries per KV head, and tokens."""
        heads, group, _ = self.q.shape
        if self.k is None:
            return heads, group, self.q.shape[2]
        return heads, group, (self.k if self.rows is None else self.rows).shape[1]

    @property
    def by_token(self) -> bool:
        """Whether the heads of a token are adjacent in memory, and are read together."""
        return self.k is not None and self.rows is None and heads_side_by_side(self.k)

    @property
    def piece(self) -> int:
        """Tokens per thread at once."""
        return TOKENS if self.by_token else PIECE


class Attended(NamedTuple):
    """The result of `attend`: out [Hk, G, d'], zeros where no token counts, and lse [Hk, G], -inf there.

    For the first set, of `tokens` n: `weights` [Hk, G, n or more], e^(s - top), and `parts` [Hk, pieces, G, ..], which
    include `top`.
    """

    out: Tensor
    lse: Tensor
    weights: Tensor
    tokens: int
    parts: Tensor
    piece: int


@inlined
def _begins(x: Any, d: int, rows: Any, start: int, step: int, j: int, part: int) -> Any:
    # Offsets of four scattered rows; rows some turns later are prefetched.
    for turn in range(4):
        prefetch(x, start + rows[min(j + turn * part + AHEAD, len(rows) - 1)] * step, d)
    return (
        np.uint64(start + rows[j] * step),
        np.uint64(start + rows[j + part] * step),
        np.uint64(start + rows[j + 2 * part] * step),
        np.uint64(start + rows[j + 3 * part] * step),
    )


@inlined
def _mix(w: Any, v: Any, h: int, j: int, part: int, at: Any, d: int, group: int, sums: Any) -> None:
    a0, a1, a2, a3 = at
    for g in range(group):
        w0, w1, w2, w3 = w[h, g, j], w[h, g, j + part], w[h, g, j + 2 * part], w[h, g, j + 3 * part]
        for c in range(d):
            i = np.uint64(c)
            sums[np.uint64(g), i] += w0 * v[a0 + i] + w1 * v[a1 + i] + w2 * v[a2 + i] + w3 * v[a3 + i]


@inlined
def _mix_one(w: Any, v: Any, h: int, j: int, at: int, d: int, group: int, sums: Any) -> None:
    for g in range(group):
        for c in range(d):
            sums[g, c] += w[h, g, j] * v[at + np.uint64(c)]


@inlined
def weigh(scores: Any, h: int, first: int, last: int, form: Any, log_counts: Any, valid: Any, sums: Any) -> None:
    """Turn the products of a piece into weights; store the highest score and the sum after the `sums` [G, d' + ..]."""
    scale, softcap, d_v = form
    for g in range(scores.shape[1]):
        row = scores[h, g, first:last]
        for i in range(len(row)):
            row[i] *= scale
        if softcap > 0:
            for i in range(len(row)):
                twice = np.float32(2) * row[i] / softcap
                far = exp(np.float32(80) if twice > np.float32(80) else twice)
                row[i] = softcap - np.float32(2) * softcap / (far + np.float32(1))
        if len(log_counts):
            own = log_counts[h, g % log_counts.shape[1], first:last]
            for i in range(len(row)):
                row[i] += own[i]
        if len(valid):
            seen = valid[h, first:last]
            for i in range(len(row)):
                row[i] = row[i] if seen[i] else _NONE
        top = highest(row)
        shift = top if top > _NONE else np.float32(0)  # a piece without valid tokens
        total = np.float32(0)
        for i in range(len(row)):
            row[i] = exp(row[i] - shift)
            total += row[i]
        sums[g, d_v], sums[g, d_v + 1] = top, total
        sums[g, :d_v] = 0


@inlined
def merge_pieces(parts: Any, out: Any, lse: Any) -> None:
    """Merge the pieces of all sets."""
    heads, group, d = out.shape
    for h in range(heads):
        for g in range(group):
            top = _NONE
            for part in parts[h]:
                top = part[g, d] if part[g, d] > top else top
            shift = top if top > _NONE else np.float32(0)
            total, row = np.float32(0), out[h, g]
            row[:] = 0
            for part in parts[h]:
                share, own = exp(part[g, d] - shift), part[g]
                total += share * own[d + 1]
                for c in range(d):
                    row[c] += share * own[c]
            lse[h, g] = shift + np.log(total)
            if total != 0:
                for c in range(d):
                    row[c] /= total


@inlined
def _attend_to_piece(
    read: Any, at: Any, given: Any, scores: Any, n: int, h: int, own: int, sums: Any, sizes: tuple[int, int, int]
) -> None:
    """Attend to the piece `own` of a head's n tokens; `sizes` are known at compile time."""
    (q, k, v, k_head, k_token, v_head, v_token, far), (form, log_counts, valid), (d, d_v, group) = read, given, sizes
    first, last = own * PIECE, min(own * PIECE + PIECE, n)
    part = (last - first) // 4  # four streams: a processor prefetches in each
    if len(at) and len(k):
        rows = at[h % len(at)]
        for j in range(first, first + part):
            dots(q, k, h, j, part, _begins(k, d, rows, h * k_head, k_token, j, part), d, group, scores)
        for j in range(first + 4 * part, last):
            dot(q, k, h, j, np.uint64(h * k_head + rows[j] * k_token), d, group, scores)
    elif len(k):
        for j in range(first, first + part):
            dots(q, k, h, j, part, apart(k, h * k_head + j * k_token, k_token, part, d, far), d, group, scores)
        for j in range(first + 4 * part, last):
            dot(q, k, h, j, np.uint64(h * k_head + j * k_token), d, group, scores)
    weigh(scores, h, first, last, form, log_counts, valid, sums)
    if len(at):
        rows = at[h % len(at)]
        for j in range(first, first + part):
            _mix(scores, v, h, j, part, _begins(v, d_v, rows, h * v_head, v_token, j, part), d_v, group, sums)
        for j in range(first + 4 * part, last):
            _mix_one(scores, v, h, j, np.uint64(h * v_head + rows[j] * v_token), d_v, group, sums)
    else:
        for j in range(first, first + part):
            here = apart(v, h * v_head + j * v_token, v_token, part, d_v, far)
            _mix(scores, v, h, j, part, here, d_v, group, sums)
        for j in range(first + 4 * part, last):
            _mix_one(scores, v, h, j, np.uint64(h * v_head + j * v_token), d_v, group, sums)


@cache
def _loops(d: int, d_v: int, group: int) -> tuple[Any, Any]:
    """Make the loops over keys of d and values of d_v numbers, for `group` queries that share a KV head.

    Rows are `head` and `token` numbers apart; only rows `at` [1 or Hk, n] are read, if there are any. Where the heads
    of a token are adjacent, they are read by token. Without keys the scores are known already. With `far` rows are
    prefetched. The pieces of a set start at `begin`; the last set merges.
    """

    @compiled
    def by_head(read: Any, at: Any, given: Any, into: Any) -> None:
        (q, k, v, k_head, k_token, v_head, v_token, far), (form, log_counts, valid) = read, given
        scores, n, parts, begin, out, lse = into
        pieces = (n + PIECE - 1) // PIECE
        for piece in prange(len(scores) * pieces):
            h, own = piece // pieces, piece % pieces
            rows, how = (q, k, v, k_head, k_token, v_head, v_token, far), (form, log_counts, valid)  # no nested tuples
            # aligned to a cache line by torch; numba's memory may not be
            _attend_to_piece(rows, at, how, scores, n, h, own, parts[h, begin + own], (d, d_v, group))
        if begin + pieces == parts.shape[1]:
            merge_pieces(parts, out, lse)

    @compiled
    def by_token(read: Any, given: Any, into: Any) -> None:
        (q, k, v, k_head, k_token, v_head, v_token, far), (form, log_counts, valid) = read, given
        scores, n, parts, begin, out, lse = into
        heads = len(scores)
        pieces = (n + TOKENS - 1) // TOKENS
        for own in prange(pieces):
            first, last = own * TOKENS, min(own * TOKENS + TOKENS, n)
            part = (last - first) // 4
            for j in range(first, first + part):  # of all heads, so that memory is read in its order
                for h in range(heads):
                    dots(q, k, h, j, part, apart(k, h * k_head + j * k_token, k_token, part, d, far), d, group, scores)
            for j in range(first + 4 * part, last):
                for h in range(heads):
                    dot(q, k, h, j, np.uint64(h * k_head + j * k_token), d, group, scores)
            for h in range(heads):
                weigh(scores, h, first, last, form, log_counts, valid, parts[h, begin + own])
            for j in range(first, first + part):
                for h in range(heads):
                    at = apart(v, h * v_head + j * v_token, v_token, part, d_v, far)
                    _mix(scores, v, h, j, part, at, d_v, group, parts[h, begin + own])
            for j in range(first + 4 * part, last):
                for h in range(heads):
                    at_one = np.uint64(h * v_head + j * v_token)
                    _mix_one(scores, v, h, j, at_one, d_v, group, parts[h, begin + own])
        if begin + pieces == parts.shape[1]:
            merge_pieces(parts, out, lse)

    return by_head, by_token


def row_of(n: int) -> int:
    """Return the numbers of a row for n scores; a loop writes one in each row at a time.

    Rows take an odd number of cache lines, so that these are in different sets of a cache. Powers of two would be in
    the same one: for 16 rows of 16,384 numbers, attention took 1.5 times as long.
    """
    return 16 * ((n + 15) // 16 | 1)


def rows_apart(like: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Make room for scores [Hk, G, n or more]."""
    return like.new_empty(*shape[:2], row_of(shape[2]))


row_in_loops = inlined(row_of)


# What the loops of attention in a chain are told: how many heads there are, and pieces of all of them, which count the
# blocks; addresses of scale and softcap, of room, and of keys and values; numbers from head to head and from token to
# token; tokens, and the row of the newest one.
KV_HEADS, PIECES, FORM, ROOM, KEYS, VALUES, HEAD, TOKEN, _LENGTH, _NEWEST, TOLD = range(11)


@inlined
def _room(told: Any, d: int, group: int) -> Any:
    """View the room of a chain's attention: scores, and the results of all pieces."""
    heads, n = told[KV_HEADS], told[_LENGTH]
    row, begin = row_in_loops(n), told[ROOM]
    parts = floats(begin + 4 * heads * group * row, heads, (n + PIECE - 1) // PIECE, group, d + LINE)
    return floats(begin, heads, group, row), parts


@inlined
def _alike(told: Any, d: int) -> Any:
    """Return what `weigh` is told of tokens that all count once."""
    form, place = floats(told[FORM], 2), told[ROOM]
    none = at_address(place, np.float32(0), (0, 1, 0)), at_address(place, np.uint8(0), (0, 0))
    return (form[0], form[1], d), none[0], none[1]


@inlined
def weigh_all(told: Any, scores: Any, h: int, first: int, last: int, sums: Any, d: int) -> None:
    """Turn the products of a piece into weights, in a loop of a chain; see `weigh`."""
    form, log_counts, valid = _alike(told, d)
    weigh(scores, h, first, last, form, log_counts, valid, sums)


@inlined
def attend_to_all(told: Any, read: Any, scores: Any, n: int, h: int, own: int, sums: Any, sizes: Any) -> None:
    """Attend to the piece `own` of a head's n tokens, every one of which counts once, in a loop of a chain."""
    (d, group), rows = sizes, at_address(told[ROOM], np.int64(0), (0, 0))
    _attend_to_piece(read, rows, _alike(told, d), scores, n, h, own, sums, (d, d, group))


@cache
def _loops_in_chain(d: int, group: int) -> tuple[int, int]:
    """Make the loops of `AttentionInChain`: of a piece of a head, and over a head's pieces."""

    def attend_to_piece(place: int, x: int, _: int, unit: int) -> None:
        told = at_address(place, np.int64(0), TOLD)
        heads, n, head, token = told[KV_HEADS], told[_LENGTH], told[HEAD], told[TOKEN]
        scores, parts = _room(told, d, group)
        pieces, span = parts.shape[1], (heads - 1) * head + (n - 1) * token + d
        h, own = unit // pieces, unit % pieces
        k, v = floats(told[KEYS], span), floats(told[VALUES], span)
        if own == told[_NEWEST] // PIECE:
            newest, to = floats(x, (group + 2) * heads, d), h * head + told[_NEWEST] * token
            for c in range(d):
                k[to + c] = newest[group * heads + h, c]
                v[to + c] = newest[(group + 1) * heads + h, c]
        read = floats(x, heads, group, d), k, v, head, token, head, token, n * heads * d >= FAR
        attend_to_all(told, read, scores, n, h, own, parts[h, own], (d, group))

    def merge(place: int, _: int, out: int, h: int) -> None:
        told = at_address(place, np.int64(0), TOLD)
        _, parts = _room(told, d, group)
        of_head = floats(out, told[KV_HEADS], group, d)[h : h + 1]
        merge_pieces(parts[h : h + 1], of_head, np.empty((1, group), np.float32))

    return chain.called_loop(attend_to_piece), chain.called_loop(merge)


class Tokens(NamedTuple):
    """Keys and values [2, Hk, capacity, d], whose first `length` rows are tokens with the newest one.

    That goes to row `newest`, by default the last; the others may be in any order.
    """

    kv: Tensor
    length: int
    newest: int = -1

    @property
    def form(self) -> None:
        """Nothing: the numbers are as computed."""


class AttentionInChain:
    """Attention of one row to all tokens of a layer, in a `Chain`; it stores the newest key and value first.

    The row has the queries, the keys and the values of its heads of `size` numbers, one after another.
    """

    def __init__(self, heads: int, kv_heads: int, size: int, softmax: Softmax):
        self.heads, self.kv_heads, self.size = heads, kv_heads, size
        self._form = torch.tensor([softmax.scale, softmax.softcap or 0.0])

    def stages(self, x: str, out: str, told: int) -> list[chain.Stage]:
        """List the stages, which are told row `told`."""
        (attend, merge), width = self.loops(), self.heads * self.size
        return [
            chain.Called(x, attend, told, PIECES, out, width),
            chain.Called(x, merge, told, KV_HEADS, out, width),
        ]

    def loops(self) -> tuple[int, int]:
        """Return the loops over pieces and over heads."""
        return _loops_in_chain(self.size, self.heads // self.kv_heads)

    def room(self, tokens: Any) -> int:
        """Return the numbers that the stages write down, besides their result."""
        length: int = tokens.length
        return self.heads * (row_of(length) + -(-length // PIECE) * (self.size + LINE))

    def tell(self, row: Any, tokens: Any, room: int) -> int:
        """Write what the stages are told [TOLD], with the address of their room; return the numbers that they read."""
        length: int = tokens.length
        row[:TOLD] = *self.about(tokens.kv, -(-length // PIECE), room), length, tokens.newest % length
        return 2 * self.kv_heads * length * self.size

    def about(self, kv: Tensor, pieces: int, room: int) -> tuple[int, ...]:
        """Return what all loops of attention are told, for kv [2, Hk, n, d] and so many pieces of a head."""
        (part, head, token, _), at = kv.stride(), kv.data_ptr()
        return self.kv_heads, self.kv_heads * pieces, self._form.data_ptr(), room, at, at + 4 * part, head, token


@compiled
def _add_up(weights: Any, parts: Any, lse: Any, piece: int, d: int, out: Any) -> None:
    (heads, group, _), n = weights.shape, len(out)
    for own in prange((n + piece - 1) // piece):
        first, last = own * piece, min(own * piece + piece, n)
        mass = out[first:last]
        mass[:] = 0
        for h in range(heads):
            for g in range(group):
                share, row = exp(parts[h, own, g, d] - lse[h, g]), weights[h, g, first:last]
                for i in range(len(mass)):
                    mass[i] += share * row[i]


_NOTHING = np.empty(0, np.float32)
_ALL = np.empty((0, 0), np.int64)
_ONCE = np.empty((0, 1, 0), np.float32)
_EVERYBODY = np.empty((0, 0), np.bool_)


def attend(sets: Sequence[TokenSet], softmax: Softmax) -> Attended:
    """Attend to disjoint sets of tokens as if they were one."""
    shapes, d = [each.shape for each in sets], sets[0].v.shape[2]
    counts = [-(-n // each.piece) for each, (_, _, n) in zip(sets, shapes, strict=True)]
    heads, group, _ = shapes[0]
    v = sets[0].v
    parts = v.new_empty(heads, sum(counts), group, d + LINE)
    out, lse = v.new_empty(heads, group, d), v.new_empty(heads, group)
    begin, weights = 0, []
    for each, shape, pieces in zip(sets, shapes, counts, strict=True):
        weights.append(attend_set(each, shape, softmax, (parts, begin, out, lse)))
        begin += pieces
    return Attended(out, lse, weights[0], shapes[0][2], parts, sets[0].piece)


def mass(of: Attended, lse: Tensor) -> Tensor:
    """Sum the attention that each token of the first set received from all queries, given their lse: [n]."""
    out = of.weights.new_empty(of.tokens)
    run(_add_up, of.weights.numel(), of.weights, of.parts, lse, of.piece, of.out.shape[2], out)
    return out


def attend_set(tokens: TokenSet, shape: tuple[int, int, int], softmax: Softmax, into: tuple[Any, ...]) -> Tensor:
    """Attend to one of several sets; return its weights.

    `into` are the parts [Hk, pieces, G, d' + LINE] of all sets, the piece from which on this set has its own, and what
    the last set merges all parts to: out [Hk, G, d'] and lse [Hk, G].
    """
    (q, k, v, rows, valid, log_counts), d, far = tokens, tokens.v.shape[2], tokens.v.numel() >= FAR
    if k is None:
        scores, form = q, (np.float32(1), np.float32(0), d)
        read: tuple[Any, ...] = q, _NOTHING, flat(v), 0, 0, *v.stride()[:2], far
        by_head, by_token = _loops(d, d, shape[1])
    else:
        scores, form = rows_apart(q, shape), (np.float32(softmax.scale), np.float32(softmax.softcap or 0), d)
        read = q.contiguous(), flat(k), flat(v), *k.stride()[:2], *v.stride()[:2], far
        by_head, by_token = _loops(q.shape[2], d, shape[1])
    counts = _ONCE if log_counts is None else log_counts.contiguous()
    given = form, counts, _EVERYBODY if valid is None else valid.contiguous()
    if tokens.by_token:
        run(by_token, 2 * scores.numel() * d, read, given, (scores, shape[2], *into))
    else:
        at = _ALL if rows is None else rows.contiguous()
        run(by_head, 2 * scores.numel() * d, read, at, given, (scores, shape[2], *into))
    return scores


def decode_attention_ref(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
    """Reference of `decode_attention` in plain torch, in the precision of its input."""
    return finish(q, *block_attention_ref(_by_group(q, k), k, v, softmax), softmax)


def decode_attention(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
    """Attend with q [H, d] to k, v [Hk, n, d] by the fastest kernel of the device; return [H, d]."""
    if takes(q):
        return attend_rows(q, k, v, softmax)
    heads = _by_group(q, k)
    if gemv.suits(heads, k, v):
        return finish(q, *attend([TokenSet(heads, k, v)], softmax)[:2], softmax)
    return finish(q, *block_attention(heads, k, v, softmax), softmax)


def attend_chosen_suits(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor) -> bool:
    """Return whether `attend_chosen` serves: on a CPU, with `chosen` [Hk, ..] by KV head, not by query head."""
    return len(chosen) == len(k) and gemv.suits(_by_group(q, k), k, v)


def attend_chosen(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, softmax: Softmax, valid: Tensor | None = None
) -> Tensor:
    """Attend in place to `rows` [Hk, m] of k and v [Hk, n, d], without a copy; only those `valid`, bool [Hk, m]."""
    return finish(q, *attend([TokenSet(_by_group(q, k), k, v, rows, valid)], softmax)[:2], softmax)


def attend_blocks_suits(q: Tensor, blocks: Tensor) -> bool:
    """Return whether `attend_blocks` serves: on a CPU, with enough blocks [n, Hk, bytes]."""
    return quantised_loops_suit(q.view(blocks.shape[1], -1, q.shape[-1]), blocks)


def attend_blocks(
    q: Tensor, blocks: Tensor, form: BlockFormat, sizes: Tensor, k: Tensor, v: Tensor, softmax: Softmax
) -> Tensor:
    """Attend in place to quantised blocks with channel `sizes`, followed by k and v [Hk, m, d]."""
    heads = _by_group(q, k).float()
    return finish(q, *attend_quantised_cpu(heads, blocks, form, sizes, k.float(), v.float(), softmax), softmax).to(
        q.dtype
    )


def attend_rows(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, kept: Tensor | None = None) -> Tensor:
    """Attend on a GPU with every row a slot of one token; only to rows marked in `kept`, [Hk, n] bool."""
    if not same_strides(k, v):
        k, v = k.contiguous(), v.contiguous()
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lengths = torch.full((1,), k.shape[1], dtype=torch.int32, device=q.device)
    rows = PagedKV(k[None], v[None], lengths, SlotLayout.everything(k.shape[1]))
    paged_decode_attention(q[None], rows, softmax, out[None], kept=None if kept is None else kept[None])
    return out


def _by_group(q: Tensor, k: Tensor) -> Tensor:
    return q.view(k.shape[0], -1, q.shape[-1])  # [Hk, G, d]


def finish(q: Tensor, out: Tensor, lse: Tensor, softmax: Softmax) -> Tensor:
    """Let the model's sinks take part in out [Hk, G, d], with lse [Hk, G]; return [H, d]."""
    if softmax.sinks is not None:
        out = add_sinks(out, lse, softmax.sinks.view_as(lse))
    return out.reshape(q.shape[0], -1)


def attend_sets(q: Tensor, sets: Sequence[TokenSet], softmax: Softmax) -> Tensor:
    """Attend with one query per head to several sets of tokens as if they were one; at least one token must count."""
    numbers = sum(each.v.numel() for each in sets)  # a single set may be small
    if all(gemv.suits(each.q, each.v, *([] if each.k is None else [each.k]), numbers=numbers) for each in sets):
        out, lse, *_ = attend(sets, softmax)
    else:
        out, lse = merge_blocks(*(counted_attention(each, softmax) for each in sets))
    if softmax.sinks is not None:
        out = add_sinks(out, lse, softmax.sinks.view_as(lse))
    return out.to(q.dtype).reshape(q.shape[0], -1)


def counted_attention(tokens: TokenSet, softmax: Softmax) -> tuple[Tensor, Tensor]:
    """Attend to one set in torch: out [Hk, G, d], lse [Hk, G] in fp32; zeros and lse -inf where nothing counts."""
    q, k, v, rows, valid, log_counts = tokens
    if rows is not None:
        k, v = (None if x is None else x.take_along_dim(rows[..., None], 1) for x in (k, v))  # type: ignore[assignment]
    if k is not None and log_counts is None:
        mask = None if valid is None else valid[:, None].expand(-1, q.shape[1], -1)
        out, lse = block_attention(q, k, v, softmax, mask)
        if valid is None:
            return out, lse
        none = ~valid.any(-1)[:, None]  # [Hk, 1]; fused kernels differ in what they return then
        return out.masked_fill(none[..., None], 0), lse.masked_fill(none, float("-inf"))
    scores = q if k is None else attention_scores(q, k, softmax)
    if log_counts is not None:
        scores = scores + log_counts
    if valid is not None:
        scores = scores.masked_fill(~valid[:, None], float("-inf"))
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.clamp_min(torch.finfo(lse.dtype).min)[..., None])
    return weights @ v.to(weights.dtype), lse
