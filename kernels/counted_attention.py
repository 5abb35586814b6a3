"""Attention to several sets of tokens as if they were one, where some count more or less than once.

    out_h = sum_j c_hj e^(s_hj) v_j / norm_h      norm_h = sum_j c_hj e^(s_hj)      lse_h = log norm_h

c_hj tokens stand behind key j (a mean token, a sampled one); their logarithm is added to its score, -inf for none.

Shapes: q [H, d], sets of k, v [Hk, n, d] (see `TokenSet`) -> [H, d].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcli.kernels import attention_rows, few_rows
from kvcli.kernels.attention_rows import TokenSet
from kvcli.kernels.block_attention import add_sinks, attention_scores, block_attention, merge_blocks
from kvcli.kernels.softmax import Softmax


def attend_sets(q: Tensor, sets: Sequence[TokenSet], softmax: Softmax) -> Tensor:
    """Attend with one query of each head; at least one token of a head counts."""
    numbers = sum(each.v.numel() for each in sets)  # some sets may be small
    if all(few_rows.suits(each.q, each.v, *([] if each.k is None else [each.k]), numbers=numbers) for each in sets):
        out, lse, *_ = attention_rows.attend(sets, softmax)
    else:
        out, lse = merge_blocks(*(counted_attention(each, softmax) for each in sets))
    if softmax.sinks is not None:
        out = add_sinks(out, lse, softmax.sinks.view_as(lse))
    return out.to(q.dtype).reshape(q.shape[0], -1)


def counted_attention(tokens: TokenSet, softmax: Softmax) -> tuple[Tensor, Tensor]:
    """Attend to one set by torch: out [Hk, G, d], lse [Hk, G] in fp32; zeros and lse -inf where nothing counts."""
    q, k, v, rows, valid, log_counts = tokens
    if rows is not None:
        k, v = (None if x is None else x.take_along_dim(rows[..., None], 1) for x in (k, v))  # type: ignore[assignment]
    if k is not None and log_counts is None:
        mask = None if valid is None else valid[:, None].expand(-1, q.shape[1], -1)
        return block_attention(q, k, v, softmax, mask)
    scores = q if k is None else attention_scores(q, k, softmax)
    if log_counts is not None:
        scores = scores + log_counts
    if valid is not None:
        scores = scores.masked_fill(~valid[:, None], float("-inf"))
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.clamp_min(torch.finfo(lse.dtype).min)[..., None])
    return weights @ v.to(weights.dtype), lse
