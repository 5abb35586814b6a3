"""Low-rank factors of the un-rotated keys of a layer, and keys made of them (ShadowKV, arXiv 2410.21465, section 4.1).

    K [s, Hk*d] = U S V^T      B = the r rows of V^T with the largest S      A = K B^T = U_r S_r      K ~ A B

B is the top of the eigenvectors of the Gram matrix K^T K, which is summed up piece by piece: there is never more than a
piece of the keys in fp32, and A = K B^T needs no U. In fp32 this is as good as an exact SVD. Measured at s = 16,384,
Hk*d = 1,024, r = 160 and singular values that fall like 1/i: relative error 0.05638 for torch.linalg.svd and for the
Gram matrix (they differ by 5e-7), 0.05671 for a randomised SVD with two iterations, in 3.9, 1.0 and 1.3 s on one core.
Keys of exactly rank r come back to 1.1e-6, and with r = Hk*d all keys do, for B is orthogonal to rounding.

On a CPU rows of A are multiplied a few at a time, as many as its cache holds.

Shapes: keys [s, w], w = Hk*d, heads side by side -> gram [w, w] in fp32, B [r, w].
"""

import torch
from torch import Tensor

from kvcli.kernels.eigenvectors import eigenvectors

AT_ONCE = 1 << 16
"""Numbers of A that a CPU gathers and multiplies at once."""


def gram_matrix(keys: Tensor) -> Tensor:
    """K^T K in fp32 of a piece of keys [s, w]; the sum over pieces is that of the whole."""
    keys = keys.float()
    return keys.T @ keys


def right_factor(gram: Tensor, rank: int) -> Tensor:
    """B [r, w] in fp32, orthonormal rows, the most important first."""
    return eigenvectors(gram)[:, gram.shape[0] - rank :].T.flip(0)


def rebuild_keys(a: Tensor, b: Tensor, heads: Tensor, chunks: Tensor) -> Tensor:
    """Un-rotated keys of `chunks` [m] of `heads` [m] from a [n, c, r] and b [Hk, r, d] -> [m, c, d] in fp32.

    `heads` ascend: there is one product a head, which reads its factor once for all its chunks.
    """
    size, rank = a.shape[1:]
    at_once = max(1, AT_ONCE // (size * rank)) if a.device.type == "cpu" else max(1, len(chunks))
    keys = torch.empty(len(chunks), size, b.shape[2], device=a.device)
    sizes = torch.bincount(heads, minlength=b.shape[0]).tolist()
    for factor, its, out in zip(b.float(), torch.split(chunks, sizes), torch.split(keys, sizes), strict=True):
        for part, target in zip(torch.split(its, at_once), torch.split(out, at_once), strict=True):
            torch.mm(a.index_select(0, part).flatten(0, 1).float(), factor, out=target.flatten(0, 1))
    return keys
