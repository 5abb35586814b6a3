"""Orthonormal axes of a cloud of vectors, the most important first (Loki, arXiv 2406.02542; InfiniGen, OSDI 2024).

    M = X^T X  or  (X - mean)^T (X - mean)        axes = eigenvectors of M as columns, by falling eigenvalue

so that X axes has its largest columns first; with M = X^T X they are the right singular vectors of X. The moments of
several texts add up, and those of one are summed piece by piece, for never more than a piece of it is held in fp32.

Shapes: x [h, n, d] -> moments [h, d, d] in at least fp32, axes [h, d, d] in the dtype of the moments.
"""

import torch
from torch import Tensor

from kvcli.kernels.eigenvectors import eigenvectors

# Vectors of a head that are converted at once.
PIECE = 4096


def second_moments(x: Tensor) -> Tensor:
    """X^T X of every head."""
    return _summed(x, None)


def centred_moments(x: Tensor) -> Tensor:
    """X^T X of every head, less the mean of its vectors: the covariance, but for a factor."""
    return _summed(x, x.mean(1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32)))


def principal_axes(moments: Tensor) -> Tensor:
    """Axes of every head; of directions that nothing lies in, some orthonormal choice."""
    return eigenvectors(moments).flip(-1)


def _summed(x: Tensor, centre: Tensor | None) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    moments = torch.zeros(x.shape[0], x.shape[2], x.shape[2], dtype=dtype, device=x.device)
    for piece in torch.split(x, PIECE, 1):
        vectors = piece.to(dtype) if centre is None else piece - centre
        moments += vectors.transpose(1, 2) @ vectors
    return moments
