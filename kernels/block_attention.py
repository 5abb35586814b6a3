"""Attention of a block of queries over a block of keys, with what is needed to merge blocks.

    s_ij = softcap(scale * q_i . k_j) + mask_ij      out_i = sum_j softmax(s_i)_j v_j      lse_i = log sum_j exp(s_ij)

Shapes: q [Hk, m, d], k [Hk, n, d], v [Hk, n, d], mask [m, n] or [Hk, m, n] (True: attend) -> out [Hk, m, d], lse
[Hk, m] in fp32. The G query heads of a KV head are rows of the same block, so keys are never repeated from Hk to H.
"""

from functools import reduce

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from kvcli.compat import preferred_attention
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.tile_attention import serves, tile_attention

# Elements of a score matrix held at once where no fused kernel applies (256 MiB in fp32).
SCORES_AT_ONCE = 1 << 26

# What cuDNN is worth a plan for, which takes it tens to hundreds of milliseconds: whole chunks of a prompt as rows, and
# keys by powers of two that are as long as this at least. From twice as many keys on, a quarter of it is enough: as a
# GPU reads prompts by 4096 tokens, all keys before a chunk are cuDNN's then, in two shapes more. Shorter prompts would
# not win back what these take: by published rates some 10 ms for 4096 keys that a chunk sees, in 32 layers of an 8B.
PLANNED_ROWS, PLANNED_KEYS = 1024, 1 << 14

FUSED = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)


def block_attention_ref(
    q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, mask: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Plain torch in the precision of its input (at least fp32); `causal` aligns the last row with the last key."""
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
    """Scores s [Hk, m, n] without a mask, in at least fp32."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    return softmax.scores(q.to(dtype) @ k.to(dtype).transpose(-1, -2))


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, mask: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Fused where the device has a kernel that returns lse, else by ours; the reference, a bounded number of rows at a
    time, where neither serves: for very wide heads, and for few rows.

    `causal` takes square blocks only (m == n); give a mask for other shapes.
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
    """Causal attention, to the last `window` keys, in one launch: None where the device has no kernel for it.

    Shapes: q [H, m, d], k and v [Hk, n, d], whose last ones belong together -> out [H, m, d], lse [H, m].
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
    """What torch prefers for such tensors on a GPU."""
    if q.device.type != "cuda" or softmax.softcap is not None or q.shape[-1] % 8:
        return None
    grouped = q.shape[0] != k.shape[0]
    return preferred_attention(q[None], k[None], v[None], softmax.scale, causal, grouped)


def _fused(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, with_cudnn: bool) -> tuple[Tensor, Tensor]:
    """Attend by flash attention, and to long stretches of keys by cuDNN, up to twice as fast on an H100.

    cuDNN plans every shape anew: a prompt whose chunks see ever more keys would spend more time on that than on
    attention. Powers of two are few.
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
    """Combine attention over disjoint sets of keys: (out [.., d], lse [..]) each -> the same of their union."""
    if len(blocks) == 1:
        return blocks[0]
    lse = reduce(torch.logaddexp, (norm for _, norm in blocks))
    (first, norm), *others = blocks
    merged = first * torch.exp(norm - lse).unsqueeze(-1)  # fp32 at least, as lse is
    for out, norm in others:
        merged.addcmul_(out, torch.exp(norm - lse).unsqueeze(-1))
    return merged.to(first.dtype), lse


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Let a valueless logit join the norm: out [.., d], lse [..], sinks broadcast to lse -> out [.., d]."""
    return (out * torch.sigmoid(lse - sinks).unsqueeze(-1)).to(out.dtype)
