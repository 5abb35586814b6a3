"""Attention in which keys count more or less than once, beside keys that count as usual.

    out_h = sum_j c_hj e^(s_hj) v_j / norm_h      norm_h = sum_j c_hj e^(s_hj)      lse_h = log norm_h

c_hj tokens stand behind key j (a mean token, a sampled one); their logarithm is added to its score, -inf for none.

Shapes: q [Hk, G, d], k, v [Hk, n, d], log_counts [Hk, G or 1, n] or a number -> out [Hk, G, d], lse [Hk, G] in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels import attention_rows, few_rows
from kvcli.kernels.attention_rows import TokenSet
from kvcli.kernels.block_attention import add_sinks, attention_scores, block_attention, merge_blocks
from kvcli.kernels.softmax import Softmax


def counted_attention(
    q: Tensor, k: Tensor, v: Tensor, log_counts: Tensor | float, softmax: Softmax, rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attend to keys, or to those in `rows` [Hk, m], by their counts; zeros and lse -inf where none counts."""
    if few_rows.suits(q, k, v):
        counts, more = (log_counts, 0.0) if isinstance(log_counts, Tensor) else (None, log_counts)
        out, lse, *_ = attention_rows.attend([TokenSet(q, k, v, rows, log_counts=counts)], softmax)
        return out, lse + more if more else lse
    if rows is not None:
        k, v = (x.take_along_dim(rows[..., None], 1) for x in (k, v))
    return mix_counted(attention_scores(q, k, softmax) + log_counts, v)


def mix_counted(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Do so by scores [Hk, G, n] in fp32 that have the log counts in them, and are not needed any more."""
    if few_rows.suits(scores, v) and scores.is_contiguous():
        return attention_rows.attend([TokenSet(scores, None, v)], Softmax(1.0))[:2]
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.clamp_min(torch.finfo(lse.dtype).min)[..., None])
    return weights @ v.to(weights.dtype), lse


def attend_beside(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    others: tuple[Tensor, Tensor] | None,
    softmax: Softmax,
    valid: Tensor | None = None,
) -> Tensor:
    """Attend with q [H, d] to keys k, v [Hk, n, d] that count once, and to what `others`, out and lse, are over.

    Of the keys, those that are `valid`, bool [Hk, n], at least one in each row; the others have to be finite.
    """
    heads = q.view(k.shape[0], -1, q.shape[-1])  # [Hk, G, d]
    if few_rows.suits(heads, k, v):
        out, lse, *_ = attention_rows.attend([TokenSet(heads, k, v, valid=valid)], softmax)
    else:
        mask = None if valid is None else valid[:, None].expand(-1, heads.shape[1], -1)
        out, lse = block_attention(heads, k, v, softmax, mask)
    if others is not None:
        out, lse = merge_blocks((out, lse), others)
    if softmax.sinks is not None:
        out = add_sinks(out, lse, softmax.sinks.view_as(lse))
    return out.to(q.dtype).reshape(q.shape[0], -1)
