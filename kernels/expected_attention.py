"""What queries to come can be expected to attend to (arXiv 2510.00636, section 3).

Queries are taken for normal, q ~ N(mu, Sigma), with mean and covariance over those that were seen as estimates:

    z_j = exp(scale mu.k_j + scale^2 k_j^T Sigma k_j / 2)      a_j = z_j / (sum_i z_i + e^sink)

Shapes: mu [H, d], Sigma [H, d, d], keys [Hk, n, d] -> mean of a over each group [Hk, n].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvcli.kernels.softmax import Softmax

KEYS_AT_ONCE = 1 << 13  # whose products with the covariances of a KV head are held together


class QueryMoments(NamedTuple):
    """Number of the queries, their mean [H, d], sum of products of deviations [H, d, d], and where they end."""

    seen: int
    mean: Tensor
    scatter: Tensor
    end: int

    @classmethod
    def of(cls, q: Tensor, end: int) -> QueryMoments:
        """Moments of queries q [H, n, d], n >= 1, in at least fp32."""
        q = q.to(torch.promote_types(q.dtype, torch.float32))
        mean = q.mean(1)
        apart = q - mean[:, None]
        return cls(q.shape[1], mean, apart.transpose(1, 2) @ apart, end)

    @property
    def covariance(self) -> Tensor:
        """The estimate that is most likely, not the unbiased one."""
        return self.scatter / self.seen

    def joined(self, later: QueryMoments) -> QueryMoments:
        """Moments of both together (Chan, Golub and LeVeque, 1979)."""
        seen = self.seen + later.seen
        delta = later.mean - self.mean
        scatter = self.scatter + later.scatter
        scatter += delta[:, :, None] * delta[:, None] * (self.seen * later.seen / seen)
        return QueryMoments(seen, self.mean + delta * (later.seen / seen), scatter, later.end)


def expected_attention(mean: Tensor, covariance: Tensor | None, k: Tensor, softmax: Softmax) -> Tensor:
    """Expect what queries give to each token, in at least fp32; without a covariance by their mean alone."""
    attention, groups = [], mean.shape[0] // k.shape[0]
    for head, keys in enumerate(k):
        mine = slice(head * groups, (head + 1) * groups)
        scores = [
            _log_expected(mean[mine], None if covariance is None else covariance[mine], part, softmax.scale)
            for part in torch.split(keys, KEYS_AT_ONCE)
        ]
        logits = torch.cat(scores, 1)  # [G, n]
        weights = logits.softmax(1)
        if softmax.sinks is not None:
            weights *= torch.sigmoid(logits.logsumexp(1) - softmax.sinks[mine])[:, None]
        attention.append(weights.mean(0))
    return torch.stack(attention)


def _log_expected(mean: Tensor, covariance: Tensor | None, k: Tensor, scale: float) -> Tensor:
    """log z [G, n] of keys k [n, d]."""
    k = k.to(mean.dtype)
    scores = scale * (mean @ k.T)
    return scores if covariance is None else scores + scale**2 / 2 * ((k @ covariance) * k).sum(-1)
