"""Attention of the newest token of every sequence over the slots of a layer, and its appending to them, on the device.

    s_hj = f(scale * q_h . k_j)      z_h = log(sum_j e^s_hj + e^sink_h)      out_h = sum_j e^(s_hj - z_h) v_j

f is the model's softcap. j runs over the rows of the slots that hold a token (`kvcli.kernels.slot_layout`), the newest
among them, or over those of the last `span` tokens. Query heads h of one KV head are rows h*G .. h*G+G-1.

A layer that evicts says itself into which row of every KV head the newest token goes (see `append_token`), and one
that leaves tokens of its slots out, which of their rows are `kept`.

The rows in use are split over programs, each of which keeps a running softmax (out and log-sum-exp of its part, fp32);
the last of a KV head to finish makes one of them (`kvcli.kernels.merge_parts`). The program whose part holds the newest
token takes its key and value from `new` and writes them to the slot: it is the only one that reads or writes that row.
Of wide heads, which are latents that many query heads share, those are several programs' as well.

Shapes: q [b, H, d], k and v [b, Hk, rows, d], new k and v [b, Hk, d], resident [b, Hk, selected] -> out [b, H, d].
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels._triton import launch, multiprocessors, power_of_two, require, require_whole, takes
from kvcli.kernels.append_token import NewToken, append_token_ref
from kvcli.kernels.attend_part import _attend_kernel
from kvcli.kernels.block_attention import add_sinks, block_attention_ref
from kvcli.kernels.slot_layout import PagedKV, row_positions
from kvcli.kernels.softmax import Softmax

# Elements of the keys that a program holds at once, and its warps, by the bytes of an element: no registers are spilt.
BLOCKS = {2: (8192, 4), 4: (2048, 8)}
WIDEST = 256  # channels; wider heads, latents, are shared by more query heads than a program has room for


def slot_attention_ref(
    q: Tensor,
    rows: PagedKV,
    softmax: Softmax,
    out: Tensor,
    new: NewToken | None = None,
    heads: Tensor | None = None,
    span: int | None = None,
    kept: Tensor | None = None,
) -> None:
    """Plain torch in the precision of its input (at least fp32), sequence by sequence."""
    num_kv_heads = rows.k.shape[1]
    heads = torch.ones(rows.k.shape[:2], dtype=torch.bool, device=q.device) if heads is None else heads
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


def slot_attention(
    q: Tensor,
    rows: PagedKV,
    softmax: Softmax,
    out: Tensor,
    new: NewToken | None = None,
    heads: Tensor | None = None,
    span: int | None = None,
    kept: Tensor | None = None,
) -> None:
    """Append `new`, where it is given, to the rows and attend to them, the newest token included; writes `out`.

    heads [b, Hk] bool: only these KV heads append and attend, the others' rows and outputs stay as they are, so that
    heads which have to wait can attend in a call of their own. kept [b, Hk, slots * size] bool: other rows of the slots
    are not attended to; the newest token's is among them. A sequence of length 0 gets zeros. May be captured in a
    CUDA graph: shapes alone decide what is launched and allocated (partial results, on the current stream).

    Raises ValueError for shapes, dtypes or strides that the kernel cannot read.
    """
    _check(q, rows, softmax, out, new, heads, kept)
    if not takes(q):
        return slot_attention_ref(q, rows, softmax, out, new, heads, span, kept)
    (b, num_heads, d), num_kv_heads = q.shape, rows.k.shape[1]
    num_rows = rows.layout.total * rows.layout.size
    groups, layout, block_d = num_heads // num_kv_heads, rows.layout, max(16, power_of_two(d))
    block_g, block_t = max(16, power_of_two(groups)), 0
    elements, warps = BLOCKS[q.element_size()]
    if d > WIDEST:  # latents: 512 channels and 64 more, and so many query heads that they are several programs'
        block_g, warps = 16, 8
        if block_d > d:
            block_d //= 2
            block_t = max(16, power_of_two(d - block_d))
    blocks = -(-groups // block_g)
    block_n = max(16, min(64, elements // block_d))
    splits = _splits(q, b * num_kv_heads * blocks, -(-num_rows // block_n))
    # What counts KV heads serves where each has one program a part.
    arrived = rows.counts() if blocks == 1 else rows.lengths.new_zeros(b, num_kv_heads, blocks)
    parts = torch.empty(b, num_heads, splits, d, dtype=torch.float32, device=q.device)
    norms = torch.empty(b, num_heads, splits, dtype=torch.float32, device=q.device)
    launch(
        _attend_kernel,
        (b * num_kv_heads, splits, blocks),
        *(q, rows.k, rows.v, *(new or (None, None, None)), rows.resident, rows.lengths, heads, kept),
        *(parts, norms, softmax.sinks, arrived, out, *q.stride()[:2], *rows.k.stride()[:3]),
        *(*(new.k.stride()[:2] if new else (0, 0)), *out.stride()[:2]),
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
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",  # tf32 holds every bit of the half precisions
        BLOCK_G=block_g,
        BLOCK_N=block_n,
        BLOCK_S=power_of_two(splits),
        BLOCK_D=block_d,
        BLOCK_T=block_t,
        BLOCK_M=min(128, block_d),
        BLOCKS=blocks,
        warps=warps,
        # Two tiles on their way at once; with a page table, whose entries are loads too, the compiler makes it one,
        # and fp32 has no registers to spare.
        stages=3 if rows.resident is None and q.element_size() == 2 and d <= WIDEST else 2,
    )
    return None


def _splits(q: Tensor, pairs: int, blocks: int) -> int:
    """Choose so many parts that every multiprocessor has two programs, where there are so many blocks of rows."""
    splits = max(1, min(blocks, 64, 2 * multiprocessors(q) // pairs))
    return 1 << (splits.bit_length() - 1)  # few values, for each is compiled anew


def _check(
    q: Tensor,
    rows: PagedKV,
    softmax: Softmax,
    out: Tensor,
    new: NewToken | None,
    heads: Tensor | None,
    kept: Tensor | None,
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
