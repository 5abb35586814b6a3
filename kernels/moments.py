"""Running mean and variance per channel, merged batch by batch (Chan, Golub and LeVeque, 1979).

    n = n_a + n_b,  delta = mean_b - mean_a
    mean = mean_a + delta * n_b / n          M2 = M2_a + M2_b + delta^2 * n_a * n_b / n          variance = M2 / (n - 1)

Shapes: a batch x [n, c] -> mean, M2 [c] in at least fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """How many were seen, their mean and sum of squared deviations of all that was seen."""

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
