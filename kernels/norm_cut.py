"""How many of the newest tokens hold nearly all of an attention row's norm (ReFreeKV, section 3.2).

    N_j = mean over heads of sqrt(sum of a_t^2 over the newest j tokens)      least j with 1 - N_j / N_s < T

All of them where no j is enough, as with T = 0. Shapes: weights a [H, s], s >= 1, oldest token first -> j, 1 <= j <= s.
"""

import torch
from torch import Tensor


def norm_cut(weights: Tensor, threshold: float) -> int:
    """Count from one cumulative sum, in float64 for the sake of long rows."""
    norms = weights.flip(-1).to(torch.float64).square_().cumsum(-1).sqrt_().mean(0)  # [s]
    short = norms[-1] - norms >= threshold * norms[-1]
    return min(int(short.sum()) + 1, len(norms))
