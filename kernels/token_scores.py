"""Token scores for every query head: s_gj = scale * q_g . k_j, over all channels or the first few of them.

Shapes: q [H, d], keys [Hk, n, c], c <= d channels, the first c of q -> scores [Hk, G, n] in at least fp32.
`token_scores_device` has the batch in front, and lengths [b] that define the candidates; it pools groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels import gemv
from kvcli.kernels._triton import jit, launch, power_of_two, require, require_whole, takes, tl
from kvcli.kernels.group_pooling import GroupScores, Pooling, leave_scores, pool_candidates, pool_queries
from kvcli.kernels.page_table import SlotLayout, candidate_range, candidates
from kvcli.kernels.softmax import Softmax, capped

BLOCK_BYTES = 16384  # of keys held per program
WIDEST = 128  # channels at once; a program iterates over those of latents


def token_scores(q: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Score every token; G query heads share a KV head."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    heads = scale * q[:, : keys.shape[2]].to(dtype).view(keys.shape[0], -1, keys.shape[2])  # [Hk, G, c]
    if gemv.suits(heads, keys):
        return gemv.products(heads, keys)
    # With the long factor first, the product reads the keys, which are the bulk, row by row.
    return (keys.to(dtype) @ heads.transpose(1, 2)).transpose(1, 2)


def token_scores_device_ref(
    q: Tensor,
    keys: Tensor,
    lengths: Tensor,
    layout: SlotLayout,
    softmax: Softmax,
    pooling: Pooling,
    out: Tensor,
    heads: Tensor | None = None,
    excluded: Tensor | None = None,
) -> None:
    """Reference of `token_scores_device`: score everything, then mask what is not a candidate."""
    b, num_kv_heads, n, channels = keys.shape
    wide = q[..., :channels].to(torch.promote_types(q.dtype, torch.float32))
    queries = pool_queries(wide.reshape(b * num_kv_heads, -1, channels), pooling)
    products = token_scores(queries.flatten(0, 1), keys.flatten(0, 1), 1.0).view(b, num_kv_heads, -1, n)
    allowed = candidates(lengths, layout, n)
    pool_candidates(softmax.scores(products), pooling, allowed, out, heads, excluded, softmax.sinks)


@jit
def _token_kernel(
    q: tl.tensor,
    keys: tl.tensor,
    lengths: tl.tensor,
    heads: tl.tensor,
    excluded: tl.tensor,
    out: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    q_batch: tl.tensor,
    q_head: tl.tensor,
    keys_batch: tl.tensor,
    keys_head: tl.tensor,
    keys_row: tl.tensor,
    num_tokens: tl.tensor,
    sink: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    HK: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HOW: tl.constexpr,
    WHAT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    block, pair = tl.program_id(0), tl.program_id(1)  # some tokens, a KV head of a sequence
    if heads is not None:
        if tl.load(heads + pair) == 0:
            return
    b, h = (pair // HK).to(tl.int64), (pair % HK).to(tl.int64)
    low, high, _ = candidate_range(lengths, b, num_tokens, sink, window, SIZE, GROUP)
    token = block * BLOCK_N + tl.arange(0, BLOCK_N)
    candidate = (token >= low) & (token < high)
    g = tl.arange(0, BLOCK_G)
    products = tl.zeros([BLOCK_G, BLOCK_N], tl.float32)
    for begin in range(0, C, BLOCK_C):  # one iteration, except for latents
        c = begin + tl.arange(0, BLOCK_C)
        in_q = (g < G)[:, None] & (c < C)[None, :]
        queries = tl.load(q + b * q_batch + (h * G + g)[:, None] * q_head + c[None, :], mask=in_q, other=0.0)
        queries = queries.to(tl.float32)
        if WHAT == "q":
            if HOW == "max":
                query = tl.max(tl.where((g < G)[:, None], queries, float("-inf")), axis=0)
            else:
                query = tl.sum(queries, axis=0) / G
            queries = tl.where((g == 0)[:, None], query[None, :], 0.0)
        at = b * keys_batch + h * keys_head + token.to(tl.int64)[:, None] * keys_row + c[None, :]
        known = tl.load(keys + at, mask=candidate[:, None] & (c < C)[None, :], other=0.0).to(tl.float32)
        products += tl.dot(queries, tl.trans(known), input_precision=PRECISION)
    scores = capped(products * scale, softcap)
    if excluded is not None:
        left_out = tl.load(excluded + pair.to(tl.int64) * num_tokens + token, mask=candidate, other=1)
        candidate = candidate & (left_out == 0)
    # fmt: off
    leave_scores(scores, candidate, pair, token, block, num_tokens, tl.num_programs(0), out, tops, totals,
                 G, HOW, WHAT, BLOCK_G)
    # fmt: on


def token_scores_device(
    q: Tensor,
    keys: Tensor,
    lengths: Tensor,
    layout: SlotLayout,
    softmax: Softmax,
    pooling: Pooling,
    out: Tensor,
    heads: Tensor | None = None,
    excluded: Tensor | None = None,
) -> None:
    """Score the candidates of a batch: q [b, H, d], keys [b, Hk, n, c] -> `out` [b, Hk, n] fp32, -inf elsewhere.

    With an out of [b, 1, n], scores are pooled over all query heads, after a softmax. A softmax includes the sinks.
    heads [b, Hk] bool: scores of other heads stay as they are. Tokens in excluded [b, Hk, n] bool score -1, less than
    any after a softmax. Can be captured in a CUDA graph. Raises ValueError for shapes, dtypes or strides that the
    kernel cannot read.
    """
    (b, num_heads, d), (_, num_kv_heads, num_tokens, channels) = q.shape, keys.shape
    groups = num_heads // num_kv_heads
    require("q", q, (b, num_heads, d))
    require("keys", keys, (b, num_kv_heads, num_tokens, channels))
    require_whole("lengths", lengths, (b,), torch.int32)
    require_whole("out", out, (b, out.shape[1], num_tokens), out.dtype)
    if heads is not None:
        require_whole("heads", heads, (b, num_kv_heads), torch.bool)
    if excluded is not None:
        require_whole("excluded", excluded, (b, num_kv_heads, num_tokens), torch.bool)
    if not takes(q):
        return token_scores_device_ref(q, keys, lengths, layout, softmax, pooling, out, heads, excluded)
    block_c = max(16, min(WIDEST, power_of_two(channels)))
    block_g = max(16, power_of_two(groups))
    warps, held = (4, BLOCK_BYTES) if block_g <= 32 else (8, BLOCK_BYTES // 2)  # many heads mean large queries
    block_n = max(16, min(128, held // (block_c * keys.element_size())))
    left = GroupScores((b, num_kv_heads, groups, num_tokens), pooling, -(-num_tokens // block_n), out)
    half = torch.float32 not in (q.dtype, keys.dtype) and left.what != "q"
    launch(
        _token_kernel,
        (left.blocks, b * num_kv_heads),  # the first dimension of a grid may be larger than 65,535
        *(q, keys, lengths, heads, excluded, left.values, left.tops, left.totals, *q.stride()[:2], *keys.stride()[:3]),
        *(num_tokens, layout.sink, layout.window, softmax.scale, softmax.softcap),
        HK=num_kv_heads,
        G=groups,
        C=channels,
        SIZE=layout.size,
        GROUP=layout.group,
        HOW=left.how,
        WHAT=left.what,
        PRECISION="tf32" if half else "ieee",  # tf32 holds every bit of the half precisions
        BLOCK_G=block_g,
        BLOCK_N=block_n,
        BLOCK_C=block_c,
        warps=warps,
    )
    left.pool(lengths, layout, heads, excluded, softmax.sinks)
    return None


BLOCK_C, BLOCK_D = 32, 128  # columns and channels of a basis, per program at once


def project_heads_ref(x: Tensor, basis: Tensor, out: Tensor) -> None:
    """Reference of `project_heads`: all heads of a KV head at once, in at least fp32."""
    heads = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(1, (basis.shape[1], -1))  # type: ignore[no-untyped-call]
    out.copy_((heads @ basis).flatten(1, 2))


def project_newest_ref(k: Tensor, basis: Tensor, lengths: Tensor, out: Tensor) -> None:
    """Reference of `project_newest`: sequence by sequence."""
    found = torch.empty(*k.shape[:2], basis.shape[3], dtype=basis.dtype, device=k.device)
    project_heads_ref(k, basis, found)
    for b, length in enumerate(lengths.tolist()):
        if length:
            out[b, :, length - 1] = found[b].to(out.dtype)


@jit
def _project_kernel(
    x: tl.tensor,
    basis: tl.tensor,
    lengths: tl.tensor,
    out: tl.tensor,
    x_batch: tl.tensor,
    x_head: tl.tensor,
    out_batch: tl.tensor,
    out_head: tl.tensor,
    out_row: tl.tensor,
    N: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    b, h = (tl.program_id(0) // N).to(tl.int64), (tl.program_id(0) % N).to(tl.int64)
    out += b * out_batch + h * out_head
    if lengths is not None:
        length = tl.load(lengths + b)
        if length == 0:
            return
        out += (length - 1).to(tl.int64) * out_row
    x += b * x_batch + h * x_head
    basis += (b * (N // G) + h // G) * D * C
    j = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    found = tl.zeros([BLOCK_C], tl.float32)
    for start in range(0, D, BLOCK_D):
        c = start + tl.arange(0, BLOCK_D)
        channels = tl.load(x + c, mask=c < D, other=0.0).to(tl.float32)
        inside = (c < D)[:, None] & (j < C)[None, :]
        columns = tl.load(basis + c[:, None] * C + j[None, :], mask=inside, other=0.0).to(tl.float32)
        found += tl.sum(channels[:, None] * columns, axis=0)
    tl.store(out + j, found.to(out.dtype.element_ty), mask=j < C)


def project_heads(x: Tensor, basis: Tensor, out: Tensor) -> None:
    """Write x [b, n, d] in the basis of its KV heads [b, Hk, d, c] to `out` [b, n, c], which is not x.

    Serves InfiniGen's skewed columns and Loki's principal axes. Can be captured in a CUDA graph. Raises ValueError for
    shapes, dtypes or strides that the kernel cannot read.
    """
    b, num_heads, _ = x.shape
    _check(x, basis)
    require("out", out, (b, num_heads, basis.shape[3]))
    if not takes(x):
        return project_heads_ref(x, basis, out)
    return _project(x, basis, None, out, (*out.stride()[:2], 0))


def project_newest(k: Tensor, basis: Tensor, lengths: Tensor, out: Tensor) -> None:
    """Write the newest keys k [b, Hk, d], in the basis, to their place in out [b, Hk, tokens, c].

    lengths [b] int32 include the newest token; a sequence of length 0 has none. Can be captured in a CUDA graph. Raises
    ValueError for shapes, dtypes or strides that the kernel cannot read.
    """
    b, num_kv_heads, _ = k.shape
    _check(k, basis)
    require_whole("lengths", lengths, (b,), torch.int32)
    require("out", out, (b, num_kv_heads, out.shape[2], basis.shape[3]))
    if not takes(k):
        return project_newest_ref(k, basis, lengths, out)
    return _project(k, basis, lengths, out, out.stride()[:3])


def _check(x: Tensor, basis: Tensor) -> None:
    (b, num_heads, d), num_kv_heads = x.shape, basis.shape[1]
    require("x", x, (b, num_heads, d))
    require_whole("basis", basis, (b, num_kv_heads, d, basis.shape[3]))
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} heads do not belong to {num_kv_heads} KV heads")


def _project(x: Tensor, basis: Tensor, lengths: Tensor | None, out: Tensor, strides: tuple[int, ...]) -> None:
    (b, num_heads, d), (_, num_kv_heads, _, columns) = x.shape, basis.shape
    launch(
        _project_kernel,
        (b * num_heads, -(-columns // BLOCK_C)),
        *(x, basis, lengths, out, *x.stride()[:2], *strides),
        N=num_heads,
        G=num_heads // num_kv_heads,
        D=d,
        C=columns,
        BLOCK_C=BLOCK_C,
        BLOCK_D=min(BLOCK_D, power_of_two(d)),
    )
