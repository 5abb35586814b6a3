"""Attention of one new token over the keys that are resident.

Shapes: q [H, d], k [Hk, n, d], v [Hk, n, d] -> out [H, d]. Query heads h of one KV head are rows h*G .. h*G+G-1.
"""

from torch import Tensor

from kvcli.kernels.block_attention import add_sinks, block_attention, block_attention_ref
from kvcli.kernels.softmax import Softmax


def decode_attention_ref(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
    """Plain torch, in the precision of its input."""
    return _finish(q, *block_attention_ref(_by_group(q, k), k, v, softmax), softmax)


def decode_attention(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
    """Attend with the fastest kernel of the device; same result as the reference within rounding."""
    return _finish(q, *block_attention(_by_group(q, k), k, v, softmax), softmax)


def _by_group(q: Tensor, k: Tensor) -> Tensor:
    return q.view(k.shape[0], -1, q.shape[-1])  # [Hk, G, d]


def _finish(q: Tensor, out: Tensor, lse: Tensor, softmax: Softmax) -> Tensor:
    if softmax.sinks is not None:
        out = add_sinks(out, lse, softmax.sinks.view_as(lse))
    return out.reshape(q.shape[0], -1)
