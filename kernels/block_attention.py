"""Attention of a block of queries over a block of keys, with the log-sum-exp needed to merge blocks.

    s_ij = softcap(scale * q_i . k_j) + mask_ij      out_i = sum_j softmax(s_i)_j v_j      lse_i = log sum_j exp(s_ij)

Shapes: q [Hk, m, d], k [Hk, n, d], v [Hk, n, d], mask [m, n] or [Hk, m, n] (True: attend) -> out [Hk, m, d], lse [Hk,
m] in fp32. The G query heads of a KV head are rows of the same block, so keys are never repeated from Hk to H.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from kvcli.compat import preferred_attention
from kvcli.kernels._triton import interpreted, jit, launch, power_of_two, require, takes, tl
from kvcli.kernels.softmax import Softmax, capped

WIDEST = 256  # channels; a tile of wider heads does not fit into registers
FEWEST = 64  # queries; with fewer, programs that iterate over all keys leave most of the device idle


def serves(q: Tensor, v: Tensor) -> bool:
    """Return whether `tile_attention` can take such queries and values, and is better than storing scores."""
    return takes(q) and q.shape[2] == v.shape[2] <= WIDEST and q.shape[1] >= FEWEST


def tile_attention_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax: Softmax,
    causal: bool = False,
    window: int | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Reference of `tile_attention` with all scores, in at least fp32; a query without keys gets zeros and -inf."""
    (num_heads, m, _), n = q.shape, k.shape[1]
    dtype, groups = torch.promote_types(q.dtype, torch.float32), num_heads // len(k)
    keys, values = (x.to(dtype).repeat_interleave(groups, 0) for x in (k, v))
    scores = softmax.scores(q.to(dtype) @ keys.transpose(1, 2))  # [H, m, n]
    seen = torch.ones(m, n, dtype=torch.bool, device=q.device)
    if causal:
        seen = seen.tril(n - m)
    if window is not None:
        seen = seen.triu(n - m - window + 1)
    if mask is not None:
        seen = seen & (mask if mask.dim() == 2 else mask.repeat_interleave(groups, 0))
    scores = scores.masked_fill(~seen, float("-inf"))
    lse = scores.logsumexp(2)
    return (scores.softmax(2).nan_to_num() @ values).to(q.dtype), lse


@jit
def _tile_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    seen_by: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    q_head: tl.tensor,
    q_row: tl.tensor,
    k_head: tl.tensor,
    k_row: tl.tensor,
    v_head: tl.tensor,
    v_row: tl.tensor,
    mask_head: tl.tensor,
    mask_row: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    G: tl.constexpr,
    D: tl.constexpr,
    CAUSAL: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    head = tl.program_id(1)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M  # the queries that see most start first
    i, j, c = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    inside = (i < m)[:, None] & (c < D)[None, :]
    q += head.to(tl.int64) * q_head
    k += (head // G).to(tl.int64) * k_head
    v += (head // G).to(tl.int64) * v_head
    queries = tl.load(q + i.to(tl.int64)[:, None] * q_row + c[None, :], mask=inside, other=0.0)
    if WIDE:
        queries = queries.to(tl.float32)
    position = n - m + i
    begin, end = 0, n
    if CAUSAL:
        end = tl.minimum(n, n - m + first + BLOCK_M)
    if window is not None:
        begin = tl.maximum(0, n - m + first - window + 1) // BLOCK_N * BLOCK_N
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    found = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_N):
        there = start + j < n
        at = tl.full([], 0, tl.int64) + start
        keys = tl.load(
            k + at * k_row + j[None, :] * k_row + c[:, None], mask=there[None, :] & (c < D)[:, None], other=0.0
        )
        values = tl.load(
            v + at * v_row + j[:, None] * v_row + c[None, :], mask=there[:, None] & (c < D)[None, :], other=0.0
        )
        if WIDE:
            keys, values = keys.to(tl.float32), values.to(tl.float32)
        scores = capped(tl.dot(queries, keys, input_precision="ieee") * scale, softcap)
        seen = (i < m)[:, None] & there[None, :]
        if CAUSAL:
            seen = seen & (start + j[None, :] <= position[:, None])
        if window is not None:
            seen = seen & (start + j[None, :] > position[:, None] - window)
        if seen_by is not None:
            row = seen_by + (head // G).to(tl.int64) * mask_head + i.to(tl.int64)[:, None] * mask_row
            seen = seen & (tl.load(row + at + j[None, :], mask=seen, other=0) != 0)
        scores = tl.where(seen, scores, float("-inf"))
        top = tl.maximum(highest, tl.max(scores, axis=1))
        shift = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.exp(scores - shift[:, None])
        fade = tl.exp(highest - shift)
        total = total * fade + tl.sum(weights, axis=1)
        found = found * fade[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        highest = top
    norm = tl.where(total > 0, highest + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
    tl.store(lse + head.to(tl.int64) * m + i, norm, mask=i < m)
    found = found / tl.where(total > 0, total, 1.0)[:, None]
    row = out + (head.to(tl.int64) * m + i.to(tl.int64))[:, None] * D
    tl.store(row + c[None, :], found.to(out.dtype.element_ty), mask=inside)


def tile_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax: Softmax,
    causal: bool = False,
    window: int | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend for many queries where no fused kernel serves (softcap, mask, fp32), without storing scores.

    Returns out and lse; sinks are left to the caller. A `window` needs `causal`.

    Raises ValueError for shapes, dtypes or strides that the kernel cannot read.
    """
    (num_heads, m, d), (num_kv_heads, n, _) = q.shape, k.shape
    require("q", q, q.shape)
    for name, x in (("k", k), ("v", v)):
        require(name, x, (num_kv_heads, n, d), q.dtype)
    if mask is not None:
        require("mask", mask, (*mask.shape[:-2], m, n), torch.bool)
    if not takes(q):
        return tile_attention_ref(q, k, v, softmax, causal, window, mask)
    out = torch.empty(num_heads, m, d, dtype=q.dtype, device=q.device)
    lse = torch.empty(num_heads, m, dtype=torch.float32, device=q.device)
    mask_strides = (0, 0) if mask is None else (mask.stride(0) if mask.dim() == 3 else 0, mask.stride(-2))
    block_d = max(16, power_of_two(d))
    side = 32 if q.dtype == torch.float32 else 64  # no registers are spilt
    launch(
        _tile_kernel,
        (-(-m // side), num_heads),
        *(q, k, v, mask, out, lse, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *mask_strides),
        *(m, n, softmax.scale, softmax.softcap, window),
        G=num_heads // num_kv_heads,
        D=d,
        CAUSAL=causal,
        WIDE=interpreted(),
        BLOCK_M=side,
        BLOCK_N=side,
        BLOCK_D=block_d,
        warps=4 if side == 64 and block_d <= 128 else 8,
    )
    return out, lse


# Elements of a score matrix held at once where no fused kernel applies (256 MiB in fp32).
SCORES_AT_ONCE = 1 << 26

# cuDNN plans each shape, which takes tens to hundreds of milliseconds. A plan pays off for whole chunks of a prompt as
# rows, and keys in powers of two of at least this length. From twice as many keys on, a quarter of it is enough: as a
# GPU reads prompts by 4096 tokens, cuDNN then takes all keys before a chunk, with two more shapes. Shorter prompts
# would not win back their cost: by published rates some 10 ms for 4096 keys that a chunk sees, in 32 layers of an 8B.
PLANNED_ROWS, PLANNED_KEYS = 1024, 1 << 14

FUSED = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)


def block_attention_ref(
    q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, mask: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Reference of `block_attention`, in at least fp32; `causal` aligns the last row with the last key."""
    scores = attention_scores(q, k, softmax)
    if causal:
        m, n = scores.shape[-2:]
        mask = torch.ones(m, n, dtype=torch.bool, device=q.device).tril(n - m)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    lse = scores.logsumexp(-1)  # [Hk, m]
    weights = torch.exp(scores - lse.unsqueeze(-1))
    return (weights @ v.to(weights.dtype)).to(q.dtype), lse


def attention_scores(q: Tensor, k: Tensor, softmax: Softmax) -> Tensor:
    """Return scores s [Hk, m, n] without a mask, in at least fp32."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    return softmax.scores(q.to(dtype) @ k.to(dtype).transpose(-1, -2))


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, mask: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Attend by the fastest means: fused if the device has a kernel that returns lse, otherwise `tile_attention`.

    If neither serves (very wide heads, few rows), the reference runs on a bounded number of rows at a time. `causal`
    takes square blocks only (m == n); give a mask for other shapes.
    """
    if softmax.softcap is None and q.device.type == "cpu":
        bias = None if mask is None else torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
        bias = bias[None] if bias is not None and bias.dim() == 3 else bias
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q[None], k[None], v[None], 0.0, causal, attn_mask=bias, scale=softmax.scale
        )
        return out[0], lse[0]
    backend = None if mask is not None else _backend(q, k, v, softmax, causal)
    if backend in FUSED:
        return _fused(q, k, v, softmax.scale, causal, backend == SDPBackend.CUDNN_ATTENTION)
    if serves(q, v):
        return tile_attention(q, k, v, softmax, causal, mask=mask)
    if causal:
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril()
    rows = max(1, SCORES_AT_ONCE // (k.shape[0] * k.shape[1]))
    parts = []
    for start in range(0, q.shape[1], rows):
        some = slice(start, start + rows)
        parts.append(block_attention_ref(q[:, some], k, v, softmax, None if mask is None else mask[..., some, :]))
    return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts], 1)


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, window: int | None = None
) -> tuple[Tensor, Tensor] | None:
    """Attend causally, to the last `window` keys, in one launch; None if the device has no kernel for it.

    Shapes: q [H, m, d], k and v [Hk, n, d], with the last query at the last key -> out [H, m, d], lse [H, m].
    """
    if _backend(q, k, v, softmax, causal=False) not in FUSED:
        return tile_attention(q, k, v, softmax, True, window) if serves(q, v) else None
    by_token = (x.transpose(0, 1)[None] for x in (q, k, v))
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *by_token,
        *(None, None, q.shape[1], k.shape[1], 0.0, True, False),
        scale=softmax.scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )
    return out[0].transpose(0, 1), lse[0]


def _backend(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, causal: bool) -> SDPBackend | None:
    """Return the back end that torch prefers for such tensors on a GPU."""
    if q.device.type != "cuda" or softmax.softcap is not None or q.shape[-1] % 8:
        return None
    grouped = q.shape[0] != k.shape[0]
    return preferred_attention(q[None], k[None], v[None], softmax.scale, causal, grouped)


def _fused(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, with_cudnn: bool) -> tuple[Tensor, Tensor]:
    """Attend by flash attention, and to long ranges of keys by cuDNN, up to twice as fast on an H100.

    cuDNN plans every shape anew: a prompt whose chunks see ever more keys would spend more time on planning than on
    attention. Splitting keys into powers of two keeps shapes few.
    """
    start, blocks = 0, []
    if with_cudnn and not causal and q.shape[1] % PLANNED_ROWS == 0:
        least = PLANNED_KEYS if k.shape[1] < 2 * PLANNED_KEYS else PLANNED_KEYS // 4
        for size in powers_of_two(k.shape[1] // least * least):
            part = slice(start, start + size)
            out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
                q[None], k[None, :, part], v[None, :, part], None, True, 0.0, False, False, scale=scale
            )
            blocks.append((out[0], lse[0, ..., 0]))
            start += size
    if start < k.shape[1]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q[None], k[None, :, start:], v[None, :, start:], 0.0, causal, False, scale=scale
        )
        blocks.append((out[0], lse[0]))
    return merge_blocks(*blocks)


def powers_of_two(n: int) -> list[int]:
    """Write n as a sum of powers of two, each once, the largest first."""
    return [1 << bit for bit in reversed(range(n.bit_length())) if n >> bit & 1]


def merge_blocks(*blocks: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Combine attention over disjoint sets of keys, (out [.., d], lse [..]) each, into that over their union."""
    if len(blocks) == 1:
        return blocks[0]
    lse = reduce(torch.logaddexp, (norm for _, norm in blocks))
    (first, norm), *others = blocks
    merged = first * torch.exp(norm - lse).unsqueeze(-1)  # at least fp32, like lse
    for out, norm in others:
        merged.addcmul_(out, torch.exp(norm - lse).unsqueeze(-1))
    return merged.to(first.dtype), lse


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Add a valueless logit to the norm: out [.., d], lse [..], sinks broadcast to lse -> out [.., d]."""
    return (out * torch.sigmoid(lse - sinks).unsqueeze(-1)).to(out.dtype)
