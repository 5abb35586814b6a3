"""What narrow KV holds of keys and values, token by token: `BlockFormat`, and a Hadamard matrix written out."""

import torch

from kvcli.kernels.quant import BlockFormat


def hadamard(d):
    """Orthogonal; over d channels, in blocks of the largest power of two that divides them."""
    matrix, size = torch.ones(1, 1, dtype=torch.float64), d & -d
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    return torch.block_diag(*[matrix * size**-0.5] * (d // size))


def rounded(x, held, part, sizes):
    """What is held of keys (part 0) or values x [Hk, n, d], in float64; keys have channel `sizes` [Hk, d]."""
    if held == "bfloat16":
        return x.bfloat16().double()
    form, d = BlockFormat.of(held, 2, 1, x.shape[2]), x.shape[2]
    turn = hadamard(d) if part and held == "k8v4" else torch.eye(d, dtype=torch.float64)
    found = form.rounded((x.double() @ turn).float()[:, :, None], part, sizes[:, None, None])[:, :, 0]
    return found.double() @ turn.T
