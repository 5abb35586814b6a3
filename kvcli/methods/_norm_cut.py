"""ReFreeKV's cut: how many tokens hold nearly all of an attention row's norm (arXiv 2502.16886, section 3.2).

A' is the mean of the last rows of a head, for each token over those that see it, and the norm ||A'|| the mean over the
heads.
"""

import torch
from torch import Tensor

from kvcli.kernels.prefill_attention import last_rows
from kvcli.kernels.softmax import Softmax
from kvcli.sizes import slices

ROWS_AT_ONCE = 64  # whose weights over all tokens are held together


def mean_row(q: Tensor, k: Tensor, softmax: Softmax) -> Tensor:
    """A' [H, s]: mean weight of each token of k [Hk, s, d] over the last rows, q [H, r, d], that see it."""
    rows, length = q.shape[1], k.shape[1]
    total = torch.zeros(q.shape[0], length, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    for part in slices(rows, ROWS_AT_ONCE):
        seen = length - rows + part.stop
        total[:, :seen] += last_rows(q[:, part], k[:, :seen], softmax).sum(1)  # of [H, r, s]
    seen_by = (length - torch.arange(length, device=q.device)).clamp(max=rows)
    return total / seen_by


def norm_cut(weights: Tensor, threshold: float) -> int:
    """Count the newest tokens that hold nearly all of an attention row's norm.

        N_j = mean over heads of sqrt(sum of a_t^2 over the newest j tokens)      least j with 1 - N_j / N_s < T

    `weights` a [H, s], s >= 1, oldest token first. All tokens where no j is enough, as with T = 0. All norms come from
    one cumulative sum, in float64 for the sake of long rows.
    """
    norms = weights.flip(-1).to(torch.float64).square_().cumsum(-1).sqrt_().mean(0)  # [s]
    short = norms[-1] - norms >= threshold * norms[-1]
    return min(int(short.sum()) + 1, len(norms))
