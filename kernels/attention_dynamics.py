"""How attention spreads over the tokens of a prompt and shifts from query to query (CAKE, sections 3 and 4.3).

    H = -sum_ij w_ij log w_ij      V = sum_j Var_i(w_ij)
    I_j = mean over the group of the mean, over |t - j| <= kernel // 2, of Mean_i(w_it) + gamma * Var_i(w_it)

w are the attention weights of the last r queries (kernels/last_rows.py), j runs over the tokens before these r, of
which nothing is renormalised; H and V are summed over all heads. Var is unbiased, and no token stands beyond the ends.

Shapes: q [H, r, d], k [Hk, s, d], 2 <= r < s, `kernel` odd -> I [Hk, s - r] in at least fp32, H and V as numbers.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kvcli.kernels.last_rows import last_rows_by_kv_head
from kvcli.kernels.softmax import Softmax


class Dynamics(NamedTuple):
    """What a layer needs (`dispersion` H and `shift` V) and which of its tokens (`indicator` I [Hk, s - r])."""

    dispersion: float
    shift: float
    indicator: Tensor


def attention_dynamics(q: Tensor, k: Tensor, softmax: Softmax, gamma: float, kernel: int) -> Dynamics:
    """Look at the weights of one KV head at a time."""
    before = k.shape[1] - q.shape[1]
    dispersion = shift = 0.0
    indicators = []
    for weights in last_rows_by_kv_head(q, k, softmax):  # [G, r, s]
        seen = weights[..., :before]
        variance, mean = torch.var_mean(seen, 1)  # [G, s - r]
        dispersion += float(torch.special.entr(seen).sum(dtype=torch.float64))
        shift += float(variance.sum(dtype=torch.float64))
        indicator = functional.avg_pool1d(mean + gamma * variance, kernel, stride=1, padding=kernel // 2)
        indicators.append(indicator.mean(0))
    return Dynamics(dispersion, shift, torch.stack(indicators))
