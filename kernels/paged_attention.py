"""Paged decode attention: the newest token of every sequence is appended to the slots of a layer and attends to them.

Attention over all keys is merged from attention over parts of them; the sinks join the norm.

    z_h = log(sum_s e^norm_hs + e^sink_h)      out_h = sum_s e^(norm_hs - z_h) part_hs

s runs over disjoint parts of the keys: part is the output of one, norm its log-sum-exp (-inf where it has no keys).

Pages that were chosen just before may still be in host memory. The program of a part brings what its rows lack, and
then attends to them; other programs attend meanwhile.

Shapes: parts [b, H, splits, d] and norms [b, H, splits] in fp32, sinks [H] -> out [d] of one head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels._triton import (
    ALL_REGISTERS,
    interpreted,
    jit,
    last_to_arrive,
    launch,
    multiply,
    multiply_split,
    multiprocessors,
    power_of_two,
    require,
    require_whole,
    takes,
    tl,
)
from kvcli.kernels.append import NewToken, append_token_ref
from kvcli.kernels.block_attention import add_sinks, block_attention_ref
from kvcli.kernels.page_table import PagedKV, page_in_slot, row_positions, slot_of
from kvcli.kernels.recall import LISTED, HostPages, Missing, bring_missing, gather_pages_ref
from kvcli.kernels.softmax import Softmax, capped


@jit
def merge_states(
    parts: tl.tensor,
    norms: tl.tensor,
    sinks: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    there: tl.tensor,
    out: tl.tensor,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Merge the parts of query heads at once, into `out` [N]; one without any keys gets 0.

    `row` [N] counts all query heads of the batch, `head` [N] those of a sequence; only those `there` [N] are merged.
    """
    split = tl.arange(0, BLOCK_S)
    at = row.to(tl.int64)[:, None] * SPLITS + split[None, :]
    inside = there[:, None] & (split < SPLITS)[None, :]
    norm = tl.load(norms + at, mask=inside, other=float("-inf"))  # [N, BLOCK_S]
    shift = tl.max(norm, axis=1)
    if sinks is not None:
        sink = tl.load(sinks + head, mask=there, other=float("-inf")).to(tl.float32)
        shift = tl.maximum(shift, sink)
    shift = tl.where(shift == float("-inf"), 0.0, shift)
    weights = tl.exp(norm - shift[:, None])
    total = tl.sum(weights, axis=1)
    if sinks is not None:
        total += tl.exp(sink - shift)
    weights = weights / tl.where(total > 0, total, 1.0)[:, None]
    for start in range(0, D, BLOCK_D):
        c = start + tl.arange(0, BLOCK_D)
        some = inside[:, :, None] & (c < D)[None, None, :]
        part = tl.load(parts + at[:, :, None] * D + c[None, None, :], mask=some, other=0.0)
        merged = tl.sum(part * weights[:, :, None], axis=1)  # [N, BLOCK_D]
        target = out[:, None] + c[None, :]
        tl.store(target, merged.to(out.dtype.element_ty), mask=there[:, None] & (c < D)[None, :])


@jit
def _attend_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    new_k: tl.tensor,
    new_v: tl.tensor,
    new_at: tl.tensor,
    resident: tl.tensor,
    lengths: tl.tensor,
    heads: tl.tensor,
    kept: tl.tensor,
    parts: tl.tensor,
    norms: tl.tensor,
    sinks: tl.tensor,
    arrived: tl.tensor,
    attended: tl.tensor,
    addresses: tl.tensor,
    missed_pages: tl.tensor,
    missed_slots: tl.tensor,
    missed: tl.tensor,
    q_batch: tl.tensor,
    q_head: tl.tensor,
    kv_batch: tl.tensor,
    kv_head: tl.tensor,
    kv_row: tl.tensor,
    new_batch: tl.tensor,
    new_head: tl.tensor,
    out_batch: tl.tensor,
    out_head: tl.tensor,
    host_page: tl.tensor,
    host_head: tl.tensor,
    host_half: tl.tensor,
    host_row: tl.tensor,
    per_piece: tl.tensor,
    most_pieces: tl.tensor,
    num_rows: tl.tensor,
    sink: tl.tensor,
    first: tl.tensor,
    ring: tl.tensor,
    window: tl.tensor,
    low: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    span: tl.tensor,
    HK: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    EARLY: tl.constexpr,
    IN_PLACE: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCKS: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    pair, split = tl.program_id(0), tl.program_id(1)  # a KV head of a sequence, a part of its rows
    some = 0
    if BLOCKS > 1:
        some = tl.program_id(2)  # a block of its query heads
    if heads is not None:
        if tl.load(heads + pair) == 0:
            return
    b, h = (pair // HK).to(tl.int64), (pair % HK).to(tl.int64)
    length = tl.load(lengths + b)
    newest_page = (length if EARLY else length - 1) // SIZE  # if EARLY, the page of the next token
    if resident is not None:
        resident += pair.to(tl.int64) * (first - sink)
    used = tl.minimum(num_rows, (newest_page + 1) * SIZE)  # slots fill from the first on
    share = tl.cdiv(tl.cdiv(used, BLOCK_N), SPLITS) * BLOCK_N
    begin = split * share
    end = tl.minimum(begin + share, used)

    g, c = some * BLOCK_G + tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    in_q = (g < G)[:, None] & (c < D)[None, :]
    queries_at = q + b * q_batch + (h * G + g)[:, None] * q_head
    queries = tl.load(queries_at + c[None, :], mask=in_q, other=0.0)
    k += b * kv_batch + h * kv_head
    v += b * kv_batch + h * kv_head
    if addresses is not None:
        # fmt: off
        bring_missing(addresses, missed_pages, missed_slots, missed, pair, b, h, begin, end, k, v, kv_row, host_page,
                      host_head, host_half, host_row, per_piece, most_pieces, sink, K, SIZE, D, PARTS, BLOCK_K,
                      BLOCK_N, BLOCK_D)
        # fmt: on
    new_row = tl.full([], -1, tl.int32)
    if new_k is not None:
        if new_at is not None:
            new_row = tl.load(new_at + pair)
        else:
            new_row = slot_of((length - 1) // SIZE, first, ring, low) * SIZE + (length - 1) % SIZE
        new_row = tl.where(length > 0, new_row, -1)
        token_k = tl.load(new_k + b * new_batch + h * new_head + c, mask=c < D, other=0.0)
        token_v = tl.load(new_v + b * new_batch + h * new_head + c, mask=c < D, other=0.0)
    if BLOCK_T:  # channels beyond BLOCK_D, of wide heads that are not a power of two
        t = BLOCK_D + tl.arange(0, BLOCK_T)
        in_tail = (g < G)[:, None] & (t < D)[None, :]
        queries_tail = tl.load(queries_at + t[None, :], mask=in_tail, other=0.0)
        out_tail = tl.zeros([BLOCK_G, BLOCK_T], tl.float32)
        if new_k is not None:
            tail_k = tl.load(new_k + b * new_batch + h * new_head + t, mask=t < D, other=0.0)
            tail_v = tl.load(new_v + b * new_batch + h * new_head + t, mask=t < D, other=0.0)

    highest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    out = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_N):
        row = start + tl.arange(0, BLOCK_N)
        page = page_in_slot(row // SIZE, newest_page, resident, sink, first, ring, window, low, GROUP)
        position = page * SIZE + row % SIZE  # negative in an empty slot
        seen = (row < end) & (position >= 0) & (position < length) & (row != new_row)
        if span is not None:
            seen = seen & (position >= length - span)
        if kept is not None:
            seen = seen & (tl.load(kept + pair.to(tl.int64) * num_rows + row, mask=row < end, other=0) != 0)
        place = position if IN_PLACE else row
        at = place.to(tl.int64)[:, None] * kv_row + c[None, :]
        inside = seen[:, None] & (c < D)[None, :]
        keys = tl.load(k + at, mask=inside, other=0.0)
        values = tl.load(v + at, mask=inside, other=0.0)
        products = multiply(queries, tl.trans(keys), WIDE)
        if BLOCK_T:
            at_tail = place.to(tl.int64)[:, None] * kv_row + t[None, :]
            seen_tail = seen[:, None] & (t < D)[None, :]
            keys_tail = tl.load(k + at_tail, mask=seen_tail, other=0.0)
            values_tail = tl.load(v + at_tail, mask=seen_tail, other=0.0)
            products += multiply(queries_tail, tl.trans(keys_tail), WIDE)
        scores = capped(products * scale, softcap)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        top = tl.maximum(highest, tl.max(scores, axis=1))
        shift = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.exp(scores - shift[:, None])
        fade = tl.exp(highest - shift)
        total = total * fade + tl.sum(weights, axis=1)
        out = out * fade[:, None] + multiply_split(weights, values, WIDE)
        if BLOCK_T:
            out_tail = out_tail * fade[:, None] + multiply_split(weights, values_tail, WIDE)
        highest = top
    if new_k is not None:
        is_mine = (new_row >= begin) & (new_row < end)
        product = tl.sum(queries.to(tl.float32) * token_k.to(tl.float32)[None, :], axis=1)  # [BLOCK_G]
        if BLOCK_T:
            product += tl.sum(queries_tail.to(tl.float32) * tail_k.to(tl.float32)[None, :], axis=1)
        score = capped(product * scale, softcap)
        score = tl.where(is_mine, score, float("-inf"))
        top = tl.maximum(highest, score)
        shift = tl.where(top == float("-inf"), 0.0, top)
        weight, fade = tl.exp(score - shift), tl.exp(highest - shift)
        total = total * fade + weight
        out = out * fade[:, None] + weight[:, None] * token_v.to(tl.float32)[None, :]
        highest = top
        if BLOCK_T:
            out_tail = out_tail * fade[:, None] + weight[:, None] * tail_v.to(tl.float32)[None, :]
        if is_mine & (some == 0):
            place = length - 1 if IN_PLACE else new_row
            at = place.to(tl.int64) * kv_row
            tl.store(k + at + c, token_k, mask=c < D)
            tl.store(v + at + c, token_v, mask=c < D)
            if BLOCK_T:
                tl.store(k + at + t, tail_k, mask=t < D)
                tl.store(v + at + t, tail_v, mask=t < D)

    head = (b * HK + h) * G + g  # of all query heads in a row
    part = head.to(tl.int64) * SPLITS + split
    norm = tl.where(total > 0, highest + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
    tl.store(norms + part, norm, mask=g < G)
    norm_of_all = tl.where(total > 0, total, 1.0)[:, None]
    tl.store(parts + part[:, None] * D + c[None, :], out / norm_of_all, mask=in_q)
    if BLOCK_T:
        tl.store(parts + part[:, None] * D + t[None, :], out_tail / norm_of_all, mask=in_tail)
    if last_to_arrive(arrived + pair * BLOCKS + some, SPLITS):
        stop = G if BLOCKS == 1 else tl.minimum(G, (some + 1) * BLOCK_G)
        for start in range(some * BLOCK_G, stop, BLOCK_H):
            one = start + tl.arange(0, BLOCK_H)
            target = attended + b * out_batch + (h * G + one) * out_head
            merge_states(
                parts, norms, sinks, pair * G + one, h * G + one, one < stop, target, D, SPLITS, BLOCK_S, BLOCK_M
            )


# Elements of keys held at once per program, and its warps, by the bytes of an element: no registers are spilt.
BLOCKS = {2: (8192, 4), 4: (2048, 8)}
MERGED, MERGED_ELEMENTS = 16, 8192  # query heads whose parts are merged at once, at most; numbers of them in registers
WIDEST = 256  # channels; wider heads (latents) are shared by more query heads than fit into one program


def paged_decode_attention_ref(
    q: Tensor,
    rows: PagedKV,
    softmax: Softmax,
    out: Tensor,
    new: NewToken | None = None,
    heads: Tensor | None = None,
    span: int | None = None,
    kept: Tensor | None = None,
    missing: Missing | None = None,
) -> None:
    """Reference of `paged_decode_attention`: sequence by sequence, in the precision of its input (at least fp32)."""
    num_kv_heads = rows.k.shape[1]
    heads = torch.ones(rows.k.shape[:2], dtype=torch.bool, device=q.device) if heads is None else heads
    if missing is not None:
        misses = missing.misses
        gather_pages_ref(missing.host, misses._replace(counts=misses.counts * heads), rows)
    if new is not None:
        append_token_ref(rows, new, heads)
    positions = row_positions(rows.lengths, rows.layout, rows.resident).expand(*rows.k.shape[:2], -1)
    seen = positions >= (0 if span is None else (rows.lengths - span).clamp_min(0)[:, None, None])
    if kept is not None:
        seen = seen & kept
    groups = q.view(q.shape[0], num_kv_heads, -1, q.shape[-1])  # [b, Hk, G, d]
    for b, h in heads.nonzero().tolist():
        k, v = (x[b, h][positions[b, h].clamp_min(0)] if rows.in_place else x[b, h] for x in (rows.k, rows.v))
        k, v = (x.masked_fill(~seen[b, h, :, None], 0)[None] for x in (k, v))
        part, lse = block_attention_ref(groups[b, h : h + 1], k, v, softmax, seen[b, h])
        if softmax.sinks is not None:
            part = add_sinks(part, lse, softmax.sinks.view(num_kv_heads, -1)[h])
        out[b, h * groups.shape[2] : (h + 1) * groups.shape[2]] = part[0] if rows.lengths[b] else 0


def paged_decode_attention(
    q: Tensor,
    rows: PagedKV,
    softmax: Softmax,
    out: Tensor,
    new: NewToken | None = None,
    heads: Tensor | None = None,
    span: int | None = None,
    kept: Tensor | None = None,
    missing: Missing | None = None,
) -> None:
    """Append `new`, if given, to the rows and attend to them, the newest token included; write `out`.

    heads [b, Hk] bool: only these KV heads append and attend. Rows and outputs of other heads stay as they are, so that
    heads that have to wait can attend in a separate call. kept [b, Hk, slots * size] bool: only these rows of the slots
    are attended to; they include the newest token's. `missing` pages are brought into their slots, if attention
    `can_bring` them. A sequence of length 0 gets zeros. Can be captured in a CUDA graph: launches and allocations
    (partial results, on the current stream) depend on shapes only.

    Raises ValueError for shapes, dtypes or strides that the kernel cannot read.
    """
    _check(q, rows, softmax, out, new, heads, kept, missing)
    if not takes(q):
        return paged_decode_attention_ref(q, rows, softmax, out, new, heads, span, kept, missing)
    (b, num_heads, d), num_kv_heads = q.shape, rows.k.shape[1]
    num_rows = rows.layout.total * rows.layout.size
    groups, layout, block_d = num_heads // num_kv_heads, rows.layout, max(16, power_of_two(d))
    block_g, block_t = max(16, power_of_two(groups)), 0
    elements, warps = BLOCKS[q.element_size()]
    if d > WIDEST:  # latents: 512 + 64 channels, and query heads for several programs
        block_g, warps = 16, 8
        if block_d > d:
            block_d //= 2
            block_t = max(16, power_of_two(d - block_d))
    blocks = -(-groups // block_g)
    block_n = max(16, min(64, elements // block_d))
    splits = _splits(q, b * num_kv_heads * blocks, -(-num_rows // block_n))
    # The counters of KV heads serve only if each has one program per part.
    arrived = rows.counts() if blocks == 1 else rows.lengths.new_zeros(b, num_kv_heads, blocks)
    block_h, block_s = min(MERGED, power_of_two(groups)), power_of_two(splits)
    parts = torch.empty(b, num_heads, splits, d, dtype=torch.float32, device=q.device)
    norms = torch.empty(b, num_heads, splits, dtype=torch.float32, device=q.device)
    lists: tuple[Tensor | None, ...] = (None,) * 4
    strides, brought = (0,) * 6, {"K": 0, "PARTS": 0, "BLOCK_K": 0}
    if missing is not None:
        host, k = missing.host, layout.selected
        lists = host.addresses, *missing.misses
        strides = *host.strides, host.per_piece, host.addresses.shape[1]
        brought = {"K": k, "PARTS": host.parts, "BLOCK_K": min(LISTED, power_of_two(k))}
    launch(
        _attend_kernel,
        (b * num_kv_heads, splits, blocks),
        *(q, rows.k, rows.v, *(new or (None, None, None)), rows.resident, rows.lengths, heads, kept),
        *(parts, norms, softmax.sinks, arrived, out, *lists, *q.stride()[:2], *rows.k.stride()[:3]),
        *(*(new.k.stride()[:2] if new else (0, 0)), *out.stride()[:2], *strides),
        *(num_rows, layout.sink, layout.first, layout.ring, layout.window, layout.low),
        *(softmax.scale, softmax.softcap, span),
        HK=num_kv_heads,
        G=groups,
        D=d,
        SIZE=layout.size,
        GROUP=layout.group,
        EARLY=layout.early,
        IN_PLACE=rows.in_place,
        SPLITS=splits,
        WIDE=interpreted(),
        BLOCK_G=block_g,
        BLOCK_N=block_n,
        BLOCK_S=block_s,
        BLOCK_D=block_d,
        BLOCK_T=block_t,
        BLOCK_H=block_h,
        BLOCK_M=min(block_d, max(16, MERGED_ELEMENTS // (block_h * block_s))),
        BLOCKS=blocks,
        **brought,
        warps=warps,
        registers=ALL_REGISTERS if warps == 4 else None,  # there are two programs for a multiprocessor
        # Two tiles in flight; with a page table, whose entries are loads as well, the compiler makes it one, and fp32
        # has no registers to spare.
        stages=3 if rows.resident is None and q.element_size() == 2 and d <= WIDEST else 2,
    )
    return None


def can_bring(host: HostPages, rows: PagedKV) -> bool:
    """Return whether attention itself can bring pages into these rows: as they are, and by one program for each row."""
    return host.format is None and rows.k.shape[3] <= WIDEST and not rows.in_place


def _splits(q: Tensor, pairs: int, blocks: int) -> int:
    """Choose the number of parts so that every multiprocessor has two programs, if there are enough blocks of rows."""
    splits = max(1, min(blocks, 64, 2 * multiprocessors(q) // pairs))
    return 1 << (splits.bit_length() - 1)  # few values, because each is compiled anew


def _check(
    q: Tensor,
    rows: PagedKV,
    softmax: Softmax,
    out: Tensor,
    new: NewToken | None,
    heads: Tensor | None,
    kept: Tensor | None,
    missing: Missing | None,
) -> None:
    rows.check()
    (b, num_heads, _), num_kv_heads = q.shape, rows.k.shape[1]
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads cannot share {num_kv_heads} KV heads")
    require("q", q, (rows.k.shape[0], num_heads, rows.k.shape[3]), rows.k.dtype)
    require("out", out, q.shape, q.dtype)
    if new is not None:
        new.check(rows)
        if rows.layout.group > 1:
            raise ValueError("tokens that are indexed in groups have to be appended before attention")
    if heads is not None:
        require_whole("heads", heads, (b, num_kv_heads), torch.bool)
    if kept is not None:
        require_whole("kept", kept, (b, num_kv_heads, rows.layout.total * rows.layout.size), torch.bool)
    if softmax.sinks is not None:
        require_whole("sinks", softmax.sinks, (num_heads,))
    if missing is not None:
        missing.host.check(rows)
        missing.misses.check(b, num_kv_heads, rows.layout.selected)
        if not can_bring(missing.host, rows):
            raise ValueError("attention does not bring pages that are quantised, wide or not in slots: gather them")
