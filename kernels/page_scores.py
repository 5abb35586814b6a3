"""Upper bound of q.k over a page, pooled over the query heads that share a KV head.

    P_hj = scale * sum_c max(q_hc * min_jc, q_hc * max_jc) = scale * (relu(q_h) . max_j - relu(-q_h) . min_j)

Shapes: q [H, d], summary [Hk, n, 2, d] (see `page_summary`) -> scores [Hk, n], larger is better.
"""

import torch
from torch import Tensor

from kvcli.kernels.group_pooling import Pooling, pool_queries, pool_scores


def page_scores(q: Tensor, summary: Tensor, scale: float, pooling: Pooling) -> Tensor:
    """Score every page of `summary` in fp32 for every KV head."""
    heads = pool_queries(q.float().view(summary.shape[0], -1, q.shape[-1]), pooling)  # [Hk, G or 1, d]
    signed = scale * torch.cat((heads.clamp_min(0), heads.clamp_max(0)), -1)  # [Hk, G, 2d]
    # The long factor first: the product then reads the summaries, which are the bulk, row by row.
    bounds = (summary.flatten(2).to(signed.dtype) @ signed.transpose(1, 2)).transpose(1, 2)  # [Hk, G, n]
    return pool_scores(bounds, pooling)
