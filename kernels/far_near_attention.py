"""Causal attention of the newest m tokens over near keys, and over far keys that all of them see.

    s_ij = f(scale * q_i . k_j), near, j <= n - m + i      t_ij = f(scale * p_i . l_j), far
    z_i = log(sum_j e^s_ij + sum_j e^t_ij + e^sink)        out_i = sum_j e^(s_ij - z_i) v_j + sum_j e^(t_ij - z_i) w_j
    mass_j = sum over all heads, and over i with n - m + i > j, of e^(s_ij - z_i)

f is the model's softcap. The far keys have a query of their own, p, for they may stand at another distance than their
position tells. `mass` is the attention that a near token got from those that came after it.

Shapes: q, p [H, m, d]; k, v [Hk, n, d]; l, w [Hk, f, d], f >= 0, m <= n -> out [H, m, d], mass [n] in at least fp32.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kvcli.kernels.block_attention import add_sinks, attention_scores, block_attention, merge_blocks
from kvcli.kernels.softmax import Softmax


class Far(NamedTuple):
    """The far keys and values l, w [Hk, f, d], and the queries that see them, p [H, m, d]."""

    q: Tensor
    k: Tensor
    v: Tensor


def far_near_attention_ref(q: Tensor, k: Tensor, v: Tensor, far: Far, softmax: Softmax) -> tuple[Tensor, Tensor]:
    """Plain torch with the whole matrix of weights, in the precision of its input (at least fp32)."""
    (m, n), num_kv_heads = (q.shape[1], k.shape[1]), k.shape[0]
    mask = _causal(m, n, q).repeat(q.shape[0] // num_kv_heads, 1)
    near_scores = attention_scores(_fold(q, k), k, softmax).masked_fill(~mask, float("-inf"))
    scores = torch.cat((near_scores, attention_scores(_fold(far.q, k), far.k, softmax)), -1)  # [Hk, G*m, n + f]
    norm = scores.logsumexp(-1)
    if softmax.sinks is not None:
        norm = torch.logaddexp(norm, _sinks(softmax.sinks, norm, m))
    weights = torch.exp(scores - norm[..., None])
    out = weights @ torch.cat((v, far.v), 1).to(weights.dtype)
    later = _causal(m, n, q, above=1).repeat(q.shape[0] // num_kv_heads, 1)
    return out.to(q.dtype).view_as(q), (weights[..., :n] * later).sum((0, 1))


def far_near_attention(q: Tensor, k: Tensor, v: Tensor, far: Far, softmax: Softmax) -> tuple[Tensor, Tensor]:
    """Attend with the fastest kernels of the device; only the near weights are ever held as a matrix."""
    (m, n), groups = (q.shape[1], k.shape[1]), q.shape[0] // k.shape[0]
    queries = _fold(q, k)  # [Hk, G*m, d]
    mask = _causal(m, n, q).repeat(groups, 1) if m > 1 else None
    out, norm = block_attention(queries, k, v, softmax, mask)
    if far.k.shape[1]:
        out, norm = merge_blocks((out, norm), block_attention(_fold(far.q, k), far.k, far.v, softmax))
    if softmax.sinks is not None:
        sinks = _sinks(softmax.sinks, norm, m)
        out, norm = add_sinks(out, norm, sinks), torch.logaddexp(norm, sinks)
    weights = torch.exp(attention_scores(queries, k, softmax) - norm[..., None])
    later = _causal(m, n, q, above=1).repeat(groups, 1)
    return out.reshape(q.shape), weights.masked_fill(~later, 0.0).sum((0, 1))


def _causal(m: int, n: int, like: Tensor, above: int = 0) -> Tensor:
    """Keys [m, n] at least `above` tokens before each query."""
    return torch.ones(m, n, dtype=torch.bool, device=like.device).tril(n - m - above)


def _fold(q: Tensor, k: Tensor) -> Tensor:
    return q.reshape(k.shape[0], -1, q.shape[-1])  # [H, m, d] -> [Hk, G*m, d]


def _sinks(sinks: Tensor, norm: Tensor, m: int) -> Tensor:
    return sinks[:, None].expand(-1, m).reshape(norm.shape)  # [H] -> [Hk, G*m]
