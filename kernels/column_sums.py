"""Attention that each key got from all queries of a stretch, without an n*m matrix (H2O, section 4).

    a_j = sum_i w_ij      w: attention weights of the newest n tokens (kernels/last_rows.py)

Shapes: q [H, n, d], k [Hk, m, d], n <= m -> a [H, m] in at least fp32.
"""

import torch
from torch import Tensor

from kvcli.kernels.last_rows import last_rows_by_kv_head
from kvcli.kernels.softmax import Softmax

# Weights held at once, which bounds the queries handled together: on a CPU what its caches hold (4 MiB in fp32), on a
# GPU what keeps it busy (256 MiB).
WEIGHTS_AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 26}
LEAST_ROWS = 32


def column_sums(q: Tensor, k: Tensor, softmax: Softmax) -> Tensor:
    """Sum the weights of a bounded number of queries of one KV head at a time."""
    (num_heads, n, _), (num_kv_heads, m, _) = q.shape, k.shape
    groups = num_heads // num_kv_heads
    sums = q.new_zeros(num_kv_heads, groups, m, dtype=torch.promote_types(q.dtype, torch.float32))
    rows = max(LEAST_ROWS, WEIGHTS_AT_ONCE[q.device.type] // (groups * m))
    for start in range(0, n, rows):
        stop = min(start + rows, n)
        seen = m - n + stop
        for head, weights in enumerate(last_rows_by_kv_head(q[:, start:stop], k[:, :seen], softmax)):
            sums[head, :, :seen] += weights.sum(1)
    return sums.flatten(0, 1)
