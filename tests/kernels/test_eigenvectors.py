"""Gram matrices of vectors with channels that are always zero, of which fp32 gives NaN or nothing at all for some."""

import torch

from kvcli.kernels.key_bases import eigenvectors

W, USED = 64, 20


def gram(seed):
    """Of 400 vectors that lie in three directions, of very different size, of `USED` of the `W` channels."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(400, 3, generator=generator) * torch.tensor([100.0, 3.0, 0.03])
    vectors = torch.zeros(400, W)
    channels = torch.randperm(W, generator=generator)[:USED]
    vectors[:, channels] = sizes @ torch.randn(3, USED, generator=generator)
    return vectors.T @ vectors


def test_vectors_are_orthonormal_and_the_matrix_is_theirs():
    for each in map(gram, range(100)):
        found = eigenvectors(each).double()
        assert torch.allclose(found.T @ found, torch.eye(W, dtype=torch.float64), atol=1e-5)
        values = found.T @ each.double() @ found
        nothing = 1e-5 * float(each.trace())
        assert torch.allclose(values, values.diag().diag(), atol=nothing)
        assert (values.diag().diff() > -nothing).all()


def test_a_batch_of_which_one_fails():
    several = torch.stack([gram(seed) for seed in range(100)])
    found = eigenvectors(several)
    assert found.dtype == several.dtype
    assert torch.allclose(found.mT @ found, torch.eye(W), atol=1e-5)
