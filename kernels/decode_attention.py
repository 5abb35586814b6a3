"""Attention of one new token over the keys that are resident.

    out_h = sum_j softmax(scale * q_h . k_j)_j v_j

Shapes: q [H, d], k [Hk, n, d], v [Hk, n, d] -> out [H, d]. Query heads h of one KV head are rows h*G .. h*G+G-1.
"""

import torch
from torch import Tensor

from kvcli.compat import onednn_linear, onednn_suits
from kvcli.kernels._triton import same_strides, takes
from kvcli.kernels.block_attention import add_sinks, block_attention, block_attention_ref
from kvcli.kernels.slot_attention import slot_attention
from kvcli.kernels.slot_layout import PagedKV, SlotLayout
from kvcli.kernels.softmax import Softmax

# Keys from which the CPU path for long contexts is faster than the fused kernel (measured with 2 threads).
LONG = 32_768


def decode_attention_ref(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
    """Plain torch, in the precision of its input."""
    return _finish(q, *block_attention_ref(_by_group(q, k), k, v, softmax), softmax)


def decode_attention(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
    """Attend with the fastest kernel of the device; same result as the reference within rounding."""
    if takes(q):
        return attend_rows(q, k, v, softmax)
    if k.shape[1] >= LONG and q.dtype == torch.float32 and onednn_suits(v):
        return _attend_long(_by_group(q, k), k, v, softmax).reshape(q.shape[0], -1)
    return _finish(q, *block_attention(_by_group(q, k), k, v, softmax), softmax)


def attend_rows(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, kept: Tensor | None = None) -> Tensor:
    """Attend on a GPU: every row is a slot of one token; of the rows those that are `kept`, [Hk, n] bool."""
    if not same_strides(k, v):
        k, v = k.contiguous(), v.contiguous()
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lengths = torch.full((1,), k.shape[1], dtype=torch.int32, device=q.device)
    rows = PagedKV(k[None], v[None], lengths, SlotLayout.everything(k.shape[1]))
    slot_attention(q[None], rows, softmax, out[None], kept=None if kept is None else kept[None])
    return out


def _attend_long(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
    """Attend to many keys on the CPU, q [Hk, G, d] -> [Hk, G, d]: two products that read K and V at the memory's rate.

    The long factor comes first in the one, and the other is a linear layer with V as its weight.
    """
    scores = (k @ (softmax.scale * q).transpose(1, 2)).transpose(1, 2)  # [Hk, G, n]
    if softmax.softcap is not None:
        scores = torch.tanh(scores / softmax.softcap) * softmax.softcap
    if softmax.sinks is not None:
        scores = torch.cat((scores, softmax.sinks.view(*scores.shape[:2], 1)), -1)
    weights = scores.softmax(-1)[..., : k.shape[1]].contiguous()
    return torch.stack([onednn_linear(weights[head], v[head].T) for head in range(k.shape[0])])


def _by_group(q: Tensor, k: Tensor) -> Tensor:
    return q.view(k.shape[0], -1, q.shape[-1])  # [Hk, G, d]


def _finish(q: Tensor, out: Tensor, lse: Tensor, softmax: Softmax) -> Tensor:
    if softmax.sinks is not None:
        out = add_sinks(out, lse, softmax.sinks.view_as(lse))
    return out.reshape(q.shape[0], -1)
