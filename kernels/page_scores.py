"""Upper bound of q.k over a page, pooled over the query heads that share a KV head.

    P_hj = scale * sum_c max(q_hc * min_jc, q_hc * max_jc) = scale * (relu(q_h) . max_j - relu(-q_h) . min_j)

Shapes: q [H, d], summary [Hk, n, 2, d] (see `page_summary`) -> scores [Hk, n], larger is better.

`pooling` names what is pooled over the group and how (FreeKV, appendix B.2): the softmax over pages of each head
(mean_s, max_s), the bounds themselves (mean_qk, max_qk) or the queries (mean_q, max_q).
"""

from typing import Literal

import torch
from torch import Tensor

Pooling = Literal["mean_s", "max_s", "mean_qk", "max_qk", "mean_q", "max_q"]


def page_scores(q: Tensor, summary: Tensor, scale: float, pooling: Pooling) -> Tensor:
    """Score every page of `summary` in fp32 for every KV head."""
    heads = q.float().view(summary.shape[0], -1, q.shape[-1])  # [Hk, G, d]
    how, what = pooling.split("_")
    if what == "q":
        heads = _pool(heads, how)[:, None]
    signed = torch.cat((heads.clamp_min(0), heads.clamp_max(0)), -1)  # [Hk, G, 2d]
    bounds = scale * (signed @ summary.flatten(2).to(signed.dtype).transpose(1, 2))  # [Hk, G, n]
    return _pool(bounds.softmax(-1) if what == "s" else bounds, how)


def _pool(values: Tensor, how: str) -> Tensor:
    return values.mean(1) if how == "mean" else values.amax(1)  # over the group
