"""How the last queries of a prompt vote for the tokens before them (SnapKV, section 4; Listing 1 there).

    a_j = sum_i w_ij      vote_j = mean over the group of max(a_t, |t - j| <= kernel // 2)

w are the attention weights of the last r queries (kernels/last_rows.py), j runs over the tokens before these r. The
maximum over neighbours keeps a token's surroundings with it.

Shapes: q [H, r, d], k [Hk, s, d], r < s, `kernel` odd -> votes [Hk, s - r] in at least fp32.
"""

import torch
from torch import Tensor
from torch.nn import functional

from kvcli.kernels.last_rows import last_rows_by_kv_head
from kvcli.kernels.softmax import Softmax


def window_votes(q: Tensor, k: Tensor, softmax: Softmax, kernel: int) -> Tensor:
    """Count the votes of one KV head at a time."""
    before = k.shape[1] - q.shape[1]
    votes = []
    for weights in last_rows_by_kv_head(q, k, softmax):  # [G, r, s]
        sums = weights[..., :before].sum(1)
        votes.append(functional.max_pool1d(sums, kernel, stride=1, padding=kernel // 2).mean(0))
    return torch.stack(votes)
