"""Attention of one new token over the keys that are resident.

    out_h = sum_j softmax(scale * q_h . k_j)_j v_j

Shapes: q [H, d], k [Hk, n, d], v [Hk, n, d] -> out [H, d]. Query heads h of one KV head are rows h*G .. h*G+G-1.
"""

import torch
from torch import Tensor

from kvcli.kernels import attention_rows, few_rows, quantised_rows
from kvcli.kernels._triton import same_strides, takes
from kvcli.kernels.attention_rows import TokenSet
from kvcli.kernels.block_attention import add_sinks, block_attention, block_attention_ref
from kvcli.kernels.quantised_blocks import BlockFormat
from kvcli.kernels.slot_attention import slot_attention
from kvcli.kernels.slot_layout import PagedKV, SlotLayout
from kvcli.kernels.softmax import Softmax


def decode_attention_ref(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
    """Plain torch, in the precision of its input."""
    return _finish(q, *block_attention_ref(_by_group(q, k), k, v, softmax), softmax)


def decode_attention(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
    """Attend with the fastest kernel of the device; same result as the reference within rounding."""
    if takes(q):
        return attend_rows(q, k, v, softmax)
    heads = _by_group(q, k)
    if few_rows.suits(heads, k, v):
        return _finish(q, *attention_rows.attend([TokenSet(heads, k, v)], softmax)[:2], softmax)
    return _finish(q, *block_attention(heads, k, v, softmax), softmax)


def attend_chosen_suits(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor) -> bool:
    """Tell whether `attend_chosen` serves: on a CPU, what is `chosen` [Hk, ..] by KV heads, not by query heads."""
    return len(chosen) == len(k) and few_rows.suits(_by_group(q, k), k, v)


def attend_chosen(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, softmax: Softmax, valid: Tensor | None = None
) -> Tensor:
    """Attend to `rows` [Hk, m] of k and v [Hk, n, d] where they lie, without a copy; to those `valid`, bool [Hk, m]."""
    return _finish(q, *attention_rows.attend([TokenSet(_by_group(q, k), k, v, rows, valid)], softmax)[:2], softmax)


def attend_blocks_suits(q: Tensor, blocks: Tensor) -> bool:
    """Tell whether `attend_blocks` serves: on a CPU, blocks [n, Hk, bytes] that are many enough."""
    return quantised_rows.suits(q.view(blocks.shape[1], -1, q.shape[-1]), blocks)


def attend_blocks(
    q: Tensor, blocks: Tensor, form: BlockFormat, sizes: Tensor, k: Tensor, v: Tensor, softmax: Softmax
) -> Tensor:
    """Attend to tokens where they lie as blocks of bytes, keys of `sizes`, and to k and v [Hk, m, d] behind them."""
    heads = _by_group(q, k).float()
    return _finish(q, *quantised_rows.attend(heads, blocks, form, sizes, k.float(), v.float(), softmax), softmax).to(
        q.dtype
    )


def attend_rows(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, kept: Tensor | None = None) -> Tensor:
    """Attend on a GPU: every row is a slot of one token; of the rows those that are `kept`, [Hk, n] bool."""
    if not same_strides(k, v):
        k, v = k.contiguous(), v.contiguous()
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lengths = torch.full((1,), k.shape[1], dtype=torch.int32, device=q.device)
    rows = PagedKV(k[None], v[None], lengths, SlotLayout.everything(k.shape[1]))
    slot_attention(q[None], rows, softmax, out[None], kept=None if kept is None else kept[None])
    return out


def _by_group(q: Tensor, k: Tensor) -> Tensor:
    return q.view(k.shape[0], -1, q.shape[-1])  # [Hk, G, d]


def _finish(q: Tensor, out: Tensor, lse: Tensor, softmax: Softmax) -> Tensor:
    if softmax.sinks is not None:
        out = add_sinks(out, lse, softmax.sinks.view_as(lse))
    return out.reshape(q.shape[0], -1)
