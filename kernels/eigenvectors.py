"""Eigenvectors of Gram matrices, which may have all but a few eigenvalues at nothing beside the largest."""

import torch
from torch import Tensor


def eigenvectors(gram: Tensor) -> Tensor:
    """Orthonormal eigenvectors of symmetric matrices [.., w, w], as columns by ascending eigenvalue, in their dtype.

    Found in fp64: where channels are always zero, LAPACK's divide and conquer in fp32 may not converge, or give NaN.
    """
    vectors: Tensor = torch.linalg.eigh(gram.double())[1]
    return vectors.to(gram.dtype)
