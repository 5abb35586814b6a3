"""The heads with the best scores, chosen by one score first and by another for what is left (arXiv 2407.15891, 3.3).

Shapes: scores [layers, heads], larger is better, -inf where there is no such head -> bool [layers, heads].
"""

import math

import torch
from torch import Tensor


def choose_heads(induction: Tensor, echo: Tensor, part: float, echo_part: float) -> Tensor:
    """Mark `part` of all heads, rounded up: `echo_part`, rounded, by echo score, the others by induction score.

    A head that is good at both takes one place. Ties go to the lower layer and head.
    """
    num_heads = int((induction > -torch.inf).sum())
    wanted = math.ceil(round(part * num_heads, 6))  # 0.15 of 20 are 3 heads, whatever the product rounds to
    chosen = torch.zeros_like(induction, dtype=torch.bool)
    for scores, so_far in ((echo, min(wanted, round(echo_part * num_heads))), (induction, wanted)):
        left = scores.masked_fill(chosen, -torch.inf).flatten()
        best = left.sort(descending=True, stable=True).indices[: so_far - int(chosen.sum())]
        chosen.view(-1)[best] = True
    return chosen
