"""The fewest tokens that hold a given part of the attention (top-p; Twilight, arXiv 2502.02770).

    least I with always <= I and sum_{j in I} w_j >= p

Found by one sort and one cumulative sum; of equal weights the lower index goes first.
Shapes: weights [..., n], each row of sum 1, always [n] bool -> kept [..., n] bool.
"""

import torch
from torch import Tensor


def nucleus(weights: Tensor, always: Tensor, p: float) -> Tensor:
    """Flag the tokens that are kept; p = 1 keeps all, whatever the sum rounds to."""
    if p >= 1:
        return torch.ones_like(weights, dtype=torch.bool)
    order = weights.masked_fill(always, float("inf")).argsort(dim=-1, descending=True, stable=True)
    ranked = weights.gather(-1, order)
    before = ranked.cumsum(-1) - ranked  # the mass of those that rank higher
    kept = torch.empty_like(weights, dtype=torch.bool).scatter_(-1, order, before < p)
    return kept | always
