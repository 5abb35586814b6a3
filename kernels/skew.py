"""A few skewed columns that stand for queries and keys (InfiniGen, OSDI 2024, section 4).

    Q A, K A with A orthogonal: (Q A)(K A)^T = Q K^T        A = right singular vectors of Q

The skew A turns queries and keys so that few columns carry most of the product. Which they are differs from prompt to
prompt: those where mean |Q A| + mean |K A| is largest. The query heads that share a KV head share its skew, made of all
their queries, so that the columns of a key are kept once and not once a query head.

Shapes: q [H, r, d], k [Hk, s, d] -> skew [Hk, d, d], columns [Hk, d, c].
"""

import torch
from torch import Tensor

from kvcli.kernels.principal_axes import PIECE, principal_axes, second_moments
from kvcli.kernels.topk import topk_pages


def skew_of(queries: Tensor, keys: Tensor) -> Tensor:
    """The skew from second moments [Hk, d, d] of queries (all of a group) and keys; columns a by falling |Q a||K a|."""
    axes = principal_axes(queries)
    # |X a|^2 = a^T M a, the diagonal of A^T M A
    strength = [(axes * (moments.to(axes) @ axes)).sum(1).clamp_min(0).sqrt() for moments in (queries, keys)]
    order = (strength[0] * strength[1]).argsort(dim=-1, descending=True, stable=True)  # [Hk, d]
    return axes.gather(2, order[:, None].expand_as(axes))


def prompt_skew(q: Tensor, k: Tensor) -> Tensor:
    """The skew of one prompt's own queries and keys."""
    return skew_of(second_moments(_by_group(q, k)), second_moments(k))


def strongest_columns(skew: Tensor, q: Tensor, k: Tensor, count: int) -> Tensor:
    """The `count` columns of the skew that carry most of this prompt's queries and keys."""
    strength = _mean_magnitude(_by_group(q, k), skew) + _mean_magnitude(k, skew)  # [Hk, d]
    columns = topk_pages(strength, count)[:, None].expand(-1, skew.shape[1], -1)  # [Hk, d, c]
    return skew.gather(2, columns)


def _mean_magnitude(x: Tensor, skew: Tensor) -> Tensor:
    """Mean over the vectors x [Hk, n, d] of |x A|: [Hk, d]."""
    total = torch.zeros_like(skew[:, 0])
    for piece in torch.split(x, PIECE, 1):
        total += (piece.to(skew.dtype) @ skew).abs().sum(1)
    return total / x.shape[1]


def _by_group(q: Tensor, k: Tensor) -> Tensor:
    return torch.reshape(q, (k.shape[0], -1, q.shape[-1]))  # [H, r, d] -> [Hk, G * r, d]
