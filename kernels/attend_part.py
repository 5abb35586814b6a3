"""The kernel of `kvcli.kernels.slot_attention`: some query heads of a KV head attend to a part of its rows.

The last program of these heads puts the parts together. Channels are a block and, where the next power of two would be
mostly empty, a tail of fewer: 512 and 64 of a latent's 576.
"""

from __future__ import annotations

from kvcli.kernels._triton import jit, last_to_arrive, round_to_tf32, tl
from kvcli.kernels.merge_parts import merge_parts
from kvcli.kernels.slot_layout import page_in_slot, slot_of
from kvcli.kernels.softmax import capped


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
    q_batch: tl.tensor,
    q_head: tl.tensor,
    kv_batch: tl.tensor,
    kv_head: tl.tensor,
    kv_row: tl.tensor,
    new_batch: tl.tensor,
    new_head: tl.tensor,
    out_batch: tl.tensor,
    out_head: tl.tensor,
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
    PRECISION: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    pair, split = tl.program_id(0), tl.program_id(1)  # a KV head of a sequence, a part of its rows
    some = 0
    if BLOCKS > 1:
        some = tl.program_id(2)  # of its query heads
    if heads is not None:
        if tl.load(heads + pair) == 0:
            return
    b, h = (pair // HK).to(tl.int64), (pair % HK).to(tl.int64)
    length = tl.load(lengths + b)
    newest_page = (length if EARLY else length - 1) // SIZE  # or the one that the next token goes into
    if resident is not None:
        resident += pair.to(tl.int64) * (first - sink)
    used = tl.minimum(num_rows, (newest_page + 1) * SIZE)  # slots fill from the first on
    share = tl.cdiv(tl.cdiv(used, BLOCK_N), SPLITS) * BLOCK_N
    begin = split * share
    end = tl.minimum(begin + share, used)

    g, c = some * BLOCK_G + tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    in_q = (g < G)[:, None] & (c < D)[None, :]
    queries_at = q + b * q_batch + (h * G + g)[:, None] * q_head
    queries = tl.load(queries_at + c[None, :], mask=in_q, other=0.0).to(tl.float32)
    k += b * kv_batch + h * kv_head
    v += b * kv_batch + h * kv_head
    new_row = tl.full([], -1, tl.int32)
    if new_k is not None:
        if new_at is not None:
            new_row = tl.load(new_at + pair)
        else:
            new_row = slot_of((length - 1) // SIZE, first, ring, low) * SIZE + (length - 1) % SIZE
        new_row = tl.where(length > 0, new_row, -1)
        token_k = tl.load(new_k + b * new_batch + h * new_head + c, mask=c < D, other=0.0)
        token_v = tl.load(new_v + b * new_batch + h * new_head + c, mask=c < D, other=0.0)
    if BLOCK_T:  # the last channels, where all of them are not the next power of two's
        t = BLOCK_D + tl.arange(0, BLOCK_T)
        in_tail = (g < G)[:, None] & (t < D)[None, :]
        queries_tail = tl.load(queries_at + t[None, :], mask=in_tail, other=0.0).to(tl.float32)
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
        keys = tl.load(k + at, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(v + at, mask=inside, other=0.0).to(tl.float32)
        products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        if BLOCK_T:
            at_tail = place.to(tl.int64)[:, None] * kv_row + t[None, :]
            seen_tail = seen[:, None] & (t < D)[None, :]
            keys_tail = tl.load(k + at_tail, mask=seen_tail, other=0.0).to(tl.float32)
            values_tail = tl.load(v + at_tail, mask=seen_tail, other=0.0).to(tl.float32)
            products += tl.dot(queries_tail, tl.trans(keys_tail), input_precision=PRECISION)
        scores = capped(products * scale, softcap)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        top = tl.maximum(highest, tl.max(scores, axis=1))
        shift = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.exp(scores - shift[:, None])
        fade = tl.exp(highest - shift)
        total = total * fade + tl.sum(weights, axis=1)
        if PRECISION == "tf32":
            weights = round_to_tf32(weights)
        out = out * fade[:, None] + tl.dot(weights, values, input_precision=PRECISION)
        if BLOCK_T:
            out_tail = out_tail * fade[:, None] + tl.dot(weights, values_tail, input_precision=PRECISION)
        highest = top
    if new_k is not None:
        is_mine = (new_row >= begin) & (new_row < end)
        product = tl.sum(queries * token_k.to(tl.float32)[None, :], axis=1)  # [BLOCK_G]
        if BLOCK_T:
            product += tl.sum(queries_tail * tail_k.to(tl.float32)[None, :], axis=1)
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
        for one in range(some * BLOCK_G, G if BLOCKS == 1 else tl.minimum(G, (some + 1) * BLOCK_G)):
            target = attended + b * out_batch + (h * G + one) * out_head
            merge_parts(parts, norms, sinks, pair * G + one, h * G + one, target, D, SPLITS, BLOCK_S, BLOCK_M)
