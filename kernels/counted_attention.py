"""Attention in which keys count more or less than once, beside keys that count as usual.

    out_h = sum_j c_hj e^(s_hj) v_j / norm_h      norm_h = sum_j c_hj e^(s_hj)      lse_h = log norm_h

c_hj tokens stand behind key j (a mean token, a sampled one); their logarithm is added to its score, -inf for none.

Shapes: q [Hk, G, d], k, v [Hk, n, d], log_counts [Hk, G or 1, n] or a number -> out [Hk, G, d], lse [Hk, G] in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels import few_rows
from kvcli.kernels.block_attention import add_sinks, attention_scores, block_attention, merge_blocks
from kvcli.kernels.softmax import Softmax


def counted_attention(
    q: Tensor, k: Tensor, v: Tensor, log_counts: Tensor | float, softmax: Softmax, rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attend to keys, or to those in `rows` [Hk, m], by their counts; zeros and lse -inf where none counts."""
    by_loops = few_rows.suits(q, k, v)
    if rows is not None and not by_loops:
        k, v = (x.take_along_dim(rows[..., None], 1) for x in (k, v))
    products = softmax.scores(few_rows.products(q, k, rows)) if by_loops else attention_scores(q, k, softmax)
    return mix_counted(products + log_counts, v, rows if by_loops else None)


def mix_counted(scores: Tensor, v: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Do so by scores [Hk, G, n] in fp32 that have the log counts in them; rows only where loops serve."""
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.clamp_min(torch.finfo(lse.dtype).min)[..., None])
    by_loops = rows is not None or few_rows.suits(weights, v)
    return few_rows.mixtures(weights, v, rows) if by_loops else weights @ v.to(weights.dtype), lse


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
    mask = None if valid is None else valid[:, None].expand(-1, heads.shape[1], -1)
    if mask is not None and few_rows.suits(heads, k, v):
        out, lse = few_rows.attend(heads, k, v, softmax, mask)
    else:
        out, lse = block_attention(heads, k, v, softmax, mask)
    if others is not None:
        out, lse = merge_blocks((out, lse), others)
    if softmax.sinks is not None:
        out = add_sinks(out, lse, softmax.sinks.view_as(lse))
    return out.to(q.dtype).reshape(q.shape[0], -1)
