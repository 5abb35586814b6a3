"""One query that stands for a window: its tokens weighted by how far they are from the usual (ActQKV, section 4.1).

    phi_j = (q_j - mean)^2 / (variance + eps)          probe = sum_j |phi_j|_1 / sum_i |phi_i|_1 * q_j

Shapes: queries [n, c] with the heads concatenated in c, moments over [c] -> probe [c] in at least fp32. Where no query
differs from the mean, as for the first of all, every one weighs the same.
"""

import torch
from torch import Tensor

from kvcli.kernels.moments import Moments

EPS = 1e-6


def activation_probe(queries: Tensor, moments: Moments) -> Tensor:
    """Weigh the queries by their activation bias."""
    queries = queries.to(moments.mean.dtype)
    bias = ((queries - moments.mean).square() / (moments.variance + EPS)).sum(1)  # [n]
    total = bias.sum()
    weights = torch.where(total > 0, bias / total, torch.full_like(bias, 1 / len(bias)))
    return weights @ queries
