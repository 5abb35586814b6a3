"""Attention of one new token over resident keys and one token that stands for those dropped (arXiv 2407.15891, eq. 5).

    out_h = (sum_j e^(s_hj) v_j + N e^(t_h) v') / (sum_j e^(s_hj) + N e^(t_h) + e^sink)
    s_hj = f(scale * q_h . k_j)      t_h = f(scale * q_h . k')

k', v' are the means of the N >= 1 dropped keys and values, so the token weighs as if each of them were it: log N is
added to its score. f is the model's softcap.

Shapes: q [H, d], k, v [Hk, n, d], k', v' [Hk, d] -> out [H, d].
"""

import math

import torch
from torch import Tensor

from kvcli.kernels.block_attention import add_sinks, attention_scores, block_attention, merge_blocks
from kvcli.kernels.softmax import Softmax


def compensated_attention_ref(
    q: Tensor, k: Tensor, v: Tensor, mean_k: Tensor, mean_v: Tensor, count: int, softmax: Softmax
) -> Tensor:
    """Plain torch, in the precision of its input (at least fp32)."""
    heads = q.view(k.shape[0], -1, q.shape[-1])  # [Hk, G, d]
    scores = attention_scores(heads, torch.cat((k, mean_k[:, None].to(k.dtype)), 1), softmax)  # [Hk, G, n + 1]
    scores[..., -1] += math.log(count)
    norm = scores.logsumexp(-1, keepdim=True)
    if softmax.sinks is not None:
        norm = torch.logaddexp(norm, softmax.sinks.view_as(norm))
    values = torch.cat((v, mean_v[:, None].to(v.dtype)), 1)
    return (torch.exp(scores - norm) @ values.to(scores.dtype)).to(q.dtype).view_as(q)


def compensated_attention(
    q: Tensor, k: Tensor, v: Tensor, mean_k: Tensor, mean_v: Tensor, count: int, softmax: Softmax
) -> Tensor:
    """Attend to the resident keys with the fastest kernel of the device and merge the one token in."""
    heads = q.view(k.shape[0], -1, q.shape[-1])  # [Hk, G, d]
    weight = attention_scores(heads, mean_k[:, None], softmax)[..., 0] + math.log(count)  # [Hk, G]
    mean = mean_v[:, None].expand_as(heads)
    out, lse = merge_blocks(block_attention(heads, k, v, softmax), (mean, weight))
    if softmax.sinks is not None:
        out = add_sinks(out, lse, softmax.sinks.view_as(lse))
    return out.to(q.dtype).reshape(q.shape)
