"""ActQKV's probe: one query that stands for a window, by how far its tokens are from the usual (arXiv 2502.13542, 4.1).

    phi_j = (q_j - mean)^2 / (variance + eps)          probe = sum_j |phi_j|_1 / sum_i |phi_i|_1 * q_j

Mean and variance per channel are merged window by window (Chan, Golub and LeVeque, 1979), in at least fp32:

    n = n_a + n_b,  delta = mean_b - mean_a
    mean = mean_a + delta * n_b / n          M2 = M2_a + M2_b + delta^2 * n_a * n_b / n          variance = M2 / (n - 1)
"""

from typing import NamedTuple

import torch
from torch import Tensor

EPS = 1e-6


class Moments(NamedTuple):
    """Number of the observations, their mean [c] and their sum of squared deviations [c]."""

    seen: int
    mean: Tensor
    m2: Tensor

    @property
    def variance(self) -> Tensor:
        """Unbiased variance [c]; zero for a single observation."""
        return self.m2 / max(1, self.seen - 1)


def moments_of(x: Tensor) -> Moments:
    """Moments of one batch x [n, c], n >= 1."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = x.mean(0)
    return Moments(len(x), mean, (x - mean).square().sum(0))


def merge_moments(a: Moments, b: Moments) -> Moments:
    """Moments of both together."""
    seen = a.seen + b.seen
    delta = b.mean - a.mean
    mean = a.mean + delta * (b.seen / seen)
    return Moments(seen, mean, a.m2 + b.m2 + delta.square() * (a.seen * b.seen / seen))


def activation_probe(queries: Tensor, moments: Moments, reverse: bool = False) -> Tensor:
    """Weigh queries [n, c], heads concatenated in c, by their activation bias -> [c] in at least fp32.

    Where no query differs from the mean, as for the first of all, each weighs the same. In `reverse` the usual ones
    weigh more, by the reciprocal of their bias (appendix D.3).
    """
    queries = queries.to(moments.mean.dtype)
    bias = ((queries - moments.mean).square() / (moments.variance + EPS)).sum(1)  # [n]
    if reverse:
        bias = 1 / (bias + EPS)
    total = bias.sum()
    weights = torch.where(total > 0, bias / total, torch.full_like(bias, 1 / len(bias)))
    return weights @ queries
