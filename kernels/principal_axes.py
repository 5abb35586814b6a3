"""Orthonormal axes of a cloud of vectors, the most important first (Loki, arXiv 2406.02542; InfiniGen, OSDI 2024).

    M = X^T X  or  (X - mean)^T (X - mean)        axes = eigenvectors of M as columns, by falling eigenvalue

so that X axes has its largest columns first; with M = X^T X they are the right singular vectors of X. The moments of
several texts add up, those of one need not be held at once.

Shapes: x [h, n, d] -> moments [h, d, d] in at least fp32, axes [h, d, d] in the dtype of the moments.
"""

import torch
from torch import Tensor


def second_moments(x: Tensor) -> Tensor:
    """X^T X of every head."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x.transpose(1, 2) @ x


def centred_moments(x: Tensor) -> Tensor:
    """X^T X of every head, less the mean of its vectors: the covariance, but for a factor."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return second_moments(x - x.mean(1, keepdim=True))


def principal_axes(moments: Tensor) -> Tensor:
    """Axes of every head; of directions that nothing lies in, some orthonormal choice."""
    vectors: Tensor = torch.linalg.eigh(moments)[1]  # ascending eigenvalues
    return vectors.flip(-1)
