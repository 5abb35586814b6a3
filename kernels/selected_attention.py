"""Attention of several queries, each to the tokens that the model itself selected for it.

    out_hi = sum_{j in S_i} softmax_{j in S_i}(scale * q_hi . k_j)_j v_j

Shapes: q [H, m, d], k and v [Hk, n, d], selected [1 or Hk, m, c] -> out [H, m, d]. All heads of a query read the same
tokens, as in DeepSeek Sparse Attention (arXiv 2512.02556), or those of a KV head do. Memory grows with m * c, for a
bounded number of queries at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels.block_attention import attention_scores
from kvcli.kernels.page_table import EMPTY, distinct
from kvcli.kernels.softmax import Softmax

AT_ONCE = 1 << 26
"""Bytes of gathered keys at once."""


def selected_attention(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
    """Attend to `softmax.selected` [1 or Hk, m, c] -> [H, m, d]; EMPTY is no token. A few queries at a time."""
    selected = softmax.selected
    assert selected is not None
    gathered = selected.shape[2] * k.shape[0] * k.shape[2] * torch.float32.itemsize
    rows = max(1, AT_ONCE // max(1, gathered))
    parts = [slice(start, start + rows) for start in range(0, q.shape[1], rows)]
    return torch.cat([_attend(q[:, part], k, v, selected[:, part], softmax) for part in parts], 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, selected: Tensor, softmax: Softmax) -> Tensor:
    scores, values = _scored(q, k, v, selected, softmax)
    if softmax.sinks is not None:
        sinks = softmax.sinks.to(scores.dtype).view(len(k), 1, -1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), -1)
    out = scores.softmax(-1)[..., : selected.shape[2]] @ values
    return out.to(q.dtype).transpose(1, 2).reshape(*q.shape[:2], -1)


def part_of_selection(q: Tensor, k: Tensor, v: Tensor, selected: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor]:
    """Attend with q [H, d] to a part of the selection, [1 or Hk, c], without sinks, as `merge_blocks` combines parts.

    Returns out [H, d] in at least fp32 and lse [H]: zeros and -inf for heads without a token.
    """
    scores, values = _scored(q[:, None], k, v, selected[:, None], softmax)
    lse = scores.logsumexp(-1)  # [Hk, 1, G]
    weights = torch.exp(scores - lse.clamp(min=torch.finfo(lse.dtype).min)[..., None])
    return (weights @ values).flatten(0, 2), lse.flatten()


def _scored(q: Tensor, k: Tensor, v: Tensor, selected: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor]:
    """Return the scores [Hk, m, G, c] of what queries selected, -inf for EMPTY, and its values [Hk, m, c, d]."""
    _, m, d = q.shape
    tokens, heads = selected.clamp(min=0), torch.arange(len(k), device=k.device)[:, None, None]
    keys, *values = (x[heads, tokens] for x in distinct(k, v))  # [Hk, m, c, d]
    queries = q.reshape(len(k), -1, m, d).transpose(1, 2)  # [Hk, m, G, d]
    scores = attention_scores(queries, keys, softmax)
    scores = scores.masked_fill_((selected == EMPTY)[:, :, None], float("-inf"))
    return scores, (values or [keys])[0].to(scores.dtype)
