"""What the query heads that share a KV head make of their scores together.

`pooling` names what is pooled over the group and how (FreeKV, appendix B.2): the softmax over candidates of each head
(mean_s, max_s), the scores themselves (mean_qk, max_qk) or the queries (mean_q, max_q).
"""

from typing import Literal

from torch import Tensor

Pooling = Literal["mean_s", "max_s", "mean_qk", "max_qk", "mean_q", "max_q"]


def pool_queries(q: Tensor, pooling: Pooling) -> Tensor:
    """Make of a group's queries [Hk, G, d] those to score with: themselves, or one [Hk, 1, d]."""
    how, what = pooling.split("_")
    return _pool(q, how)[:, None] if what == "q" else q


def pool_scores(scores: Tensor, pooling: Pooling) -> Tensor:
    """Make one row of the scores [Hk, G or 1, n] of the queries from `pool_queries` -> [Hk, n]."""
    how, what = pooling.split("_")
    return _pool(scores.softmax(-1) if what == "s" else scores, how)


def _pool(values: Tensor, how: str) -> Tensor:
    return values.mean(1) if how == "mean" else values.amax(1)  # over the group
