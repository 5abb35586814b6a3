"""How many scores of a head are within a distance of its best one, on a CPU: torch looks at all of them four times.

Shapes: scores [Hk, n] fp32 -> counts [Hk] int64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcli.kernels._numba import compiled, prange, run, serves


@compiled
def _count(scores: Any, alpha: Any, counts: Any) -> None:
    for h in prange(len(scores)):
        row, top, near = scores[h], np.float32(-np.inf), 0
        for i in range(len(row)):
            top = row[i] if row[i] > top else top
        for i in range(len(row)):
            near += row[i] >= top - alpha
        counts[h] = near


def suits(scores: Tensor) -> bool:
    """Tell whether this can count these."""
    return serves(scores)


def count(scores: Tensor, alpha: float) -> Tensor:
    """Count those that are at most `alpha` below the best of their head."""
    counts = torch.empty(len(scores), dtype=torch.int64)
    run(_count, 2 * scores.numel(), scores.contiguous(), np.float32(alpha), counts)
    return counts
