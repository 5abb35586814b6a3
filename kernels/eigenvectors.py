"""Eigenvectors of Gram matrices, which may have all but a few eigenvalues at nothing beside the largest."""

import torch
from torch import Tensor


def eigenvectors(gram: Tensor) -> Tensor:
    """Orthonormal eigenvectors of symmetric matrices [.., w, w], as columns by ascending eigenvalue, in their dtype."""
    try:
        vectors: Tensor = torch.linalg.eigh(gram)[1]
    except torch.linalg.LinAlgError:
        # In fp32 LAPACK's divide and conquer does not always end where whole channels are zero; in fp64 it does.
        vectors = torch.linalg.eigh(gram.double())[1].to(gram.dtype)
    return vectors
