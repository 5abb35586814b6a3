"""Attention to former occurrences, and to what followed them, in a text that repeats itself (arXiv 2407.15891, 3.2).

The text is `period` tokens over and over from position `first` on. With w_ij the attention weight of token i on j:

    echo_h = sum_i sum_m w_(i, i - m * period)      induction_h = sum_i sum_m w_(i, i - m * period + 1)

over all m >= 1 with i - m * period >= first: every former occurrence of token i, and the token after each.

Shapes: q [H, n, d], the queries of the newest n tokens, k [Hk, s, d] -> echo, induction [H] in fp32.
"""

import torch
from torch import Tensor

from kvcli.kernels.block_attention import SCORES_AT_ONCE
from kvcli.kernels.last_rows import last_rows
from kvcli.kernels.softmax import Softmax


def repeat_attention(q: Tensor, k: Tensor, softmax: Softmax, period: int, first: int) -> tuple[Tensor, Tensor]:
    """Sum over the newest tokens, a bounded number of attention rows at a time."""
    (num_heads, n, _), length = q.shape, k.shape[1]
    echo, induction = (torch.zeros(num_heads, device=q.device) for _ in range(2))
    rows_at_once = max(1, SCORES_AT_ONCE // (num_heads * length))
    for start in range(max(0, first + period - (length - n)), n, rows_at_once):
        part = q[:, start : start + rows_at_once]
        seen = length - n + start + part.shape[1]
        weights = last_rows(part, k[:, :seen], softmax)  # [H, r, seen]
        position = torch.arange(seen - part.shape[1], seen, device=q.device)  # [r]
        row = torch.arange(part.shape[1], device=q.device)
        for back in range(period, seen - first, period):
            former = position - back
            old = former >= first
            echo += weights[:, row[old], former[old]].sum(-1)
            induction += weights[:, row[old], former[old] + 1].sum(-1)
    return echo, induction
