"""Bases of keys: eigenvectors, principal axes, skew and low-rank factors."""

import torch
from torch import Tensor

from kvcli.kernels.topk import topk_pages


def eigenvectors(gram: Tensor) -> Tensor:
    """Return orthonormal eigenvectors of symmetric matrices [.., w, w], columns by ascending eigenvalue.

    Computed in fp64: if channels are always zero, LAPACK's divide and conquer in fp32 may not converge, or give NaN.
    """
    vectors: Tensor = torch.linalg.eigh(gram.double())[1]
    return vectors.to(gram.dtype)


# Vectors of a head that are converted at once.
PIECE = 4096


def second_moments(x: Tensor) -> Tensor:
    """Return X^T X of every head."""
    return _summed(x, None)


def centred_moments(x: Tensor) -> Tensor:
    """Return X^T X of every head with centred vectors: the covariance, up to a factor."""
    return _summed(x, x.mean(1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32)))


def principal_axes(moments: Tensor) -> Tensor:
    """Return the orthonormal axes of every head, the most important first (Loki, InfiniGen).

    Directions without any vectors get an arbitrary orthonormal basis.
    """
    return eigenvectors(moments).flip(-1)


def _summed(x: Tensor, centre: Tensor | None) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    moments = torch.zeros(x.shape[0], x.shape[2], x.shape[2], dtype=dtype, device=x.device)
    for piece in torch.split(x, PIECE, 1):
        vectors = piece.to(dtype) if centre is None else piece - centre
        moments += vectors.transpose(1, 2) @ vectors
    return moments


def skew_of(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the skew (InfiniGen, section 4) from second moments [Hk, d, d] of queries, all of a group, and keys.

    Columns a are in falling order of |Q a||K a|.
    """
    axes = principal_axes(queries)
    # |X a|^2 = a^T M a, the diagonal of A^T M A
    strength = [(axes * (moments.to(axes) @ axes)).sum(1).clamp_min(0).sqrt() for moments in (queries, keys)]
    order = (strength[0] * strength[1]).argsort(dim=-1, descending=True, stable=True)  # [Hk, d]
    return axes.gather(2, order[:, None].expand_as(axes))


def prompt_skew(q: Tensor, k: Tensor) -> Tensor:
    """Return the skew of one prompt's own queries and keys."""
    return skew_of(second_moments(_by_group(q, k)), second_moments(k))


def strongest_columns(skew: Tensor, q: Tensor, k: Tensor, count: int) -> Tensor:
    """Return the `count` columns of the skew that carry most of this prompt's queries and keys."""
    strength = _mean_magnitude(_by_group(q, k), skew) + _mean_magnitude(k, skew)  # [Hk, d]
    columns = topk_pages(strength, count)[:, None].expand(-1, skew.shape[1], -1)  # [Hk, d, c]
    return skew.gather(2, columns)


def _mean_magnitude(x: Tensor, skew: Tensor) -> Tensor:
    """Return the mean over the vectors x [Hk, n, d] of |x A|: [Hk, d]."""
    total = torch.zeros_like(skew[:, 0])
    for piece in torch.split(x, PIECE, 1):
        total += (piece.to(skew.dtype) @ skew).abs().sum(1)
    return total / x.shape[1]


def _by_group(q: Tensor, k: Tensor) -> Tensor:
    return torch.reshape(q, (k.shape[0], -1, q.shape[-1]))  # [H, r, d] -> [Hk, G * r, d]


AT_ONCE = 1 << 16
"""Numbers of A that a CPU gathers and multiplies at once."""


def gram_matrix(keys: Tensor) -> Tensor:
    """Return K^T K in fp32 of a part of the keys [s, w]; sums over parts give that of all keys."""
    keys = keys.float()
    return keys.T @ keys


def right_factor(gram: Tensor, rank: int) -> Tensor:
    """Return B [r, w] in fp32, with orthonormal rows, the most important first (ShadowKV, section 4.1)."""
    return eigenvectors(gram)[:, gram.shape[0] - rank :].T.flip(0)


def rebuild_keys(a: Tensor, b: Tensor, heads: Tensor, chunks: Tensor) -> Tensor:
    """Return un-rotated keys of `chunks` [m] of `heads` [m] from a [n, c, r] and b [Hk, r, d]: [m, c, d] in fp32.

    `heads` ascend: there is one product per head, which reads its factor once for all its chunks.
    """
    size, rank = a.shape[1:]
    at_once = max(1, AT_ONCE // (size * rank)) if a.device.type == "cpu" else max(1, len(chunks))
    keys = torch.empty(len(chunks), size, b.shape[2], device=a.device)
    sizes = torch.bincount(heads, minlength=b.shape[0]).tolist()
    for factor, its, out in zip(b.float(), torch.split(chunks, sizes), torch.split(keys, sizes), strict=True):
        for part, target in zip(torch.split(its, at_once), torch.split(out, at_once), strict=True):
            torch.mm(a.index_select(0, part).flatten(0, 1).float(), factor, out=target.flatten(0, 1))
    return keys
