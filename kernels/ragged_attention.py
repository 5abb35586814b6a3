"""Attention of one new token where every KV head has a number of keys of its own.

    out_h = sum_{j valid for h's KV head} softmax(scale * q_h . k_j)_j v_j

Shapes: q [H, d], k [Hk, n, d], v [Hk, n, d], valid [Hk, n] bool, at least one in each row -> out [H, d]. What stands in
rows that are not valid does not matter, as long as it is finite.
"""

import torch
from torch import Tensor

from kvcli.kernels.block_attention import add_sinks, block_attention, block_attention_ref
from kvcli.kernels.softmax import Softmax


def ragged_attention_ref(q: Tensor, k: Tensor, v: Tensor, valid: Tensor, softmax: Softmax) -> Tensor:
    """Plain torch head by head, without the rows that are not valid; in the precision of its input."""
    heads = q.view(k.shape[0], -1, q.shape[-1])  # [Hk, G, d]
    blocks = [
        block_attention_ref(heads[h : h + 1], k[h : h + 1, valid[h]], v[h : h + 1, valid[h]], softmax)
        for h in range(k.shape[0])
    ]
    return _finish(q, torch.cat([out for out, _ in blocks]), torch.cat([lse for _, lse in blocks]), softmax)


def ragged_attention(q: Tensor, k: Tensor, v: Tensor, valid: Tensor, softmax: Softmax) -> Tensor:
    """Attend with the fastest kernel of the device, all heads together."""
    heads = q.view(k.shape[0], -1, q.shape[-1])
    mask = valid[:, None].expand(-1, heads.shape[1], -1)  # [Hk, G, n]
    return _finish(q, *block_attention(heads, k, v, softmax, mask=mask), softmax)


def _finish(q: Tensor, out: Tensor, lse: Tensor, softmax: Softmax) -> Tensor:
    if softmax.sinks is not None:
        out = add_sinks(out, lse, softmax.sinks.view_as(lse))
    return out.reshape(q.shape)
