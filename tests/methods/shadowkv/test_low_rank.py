"""The factorisation against torch's SVD in float64, and rebuilt keys against one product a token."""

import pytest
import torch

from kvcli.kernels.key_bases import gram_matrix, rebuild_keys, right_factor

S, W = 211, 26


def keys(rank=W, seed=0):
    """Keys whose singular values fall like 1/i, `rank` of them not zero."""
    generator = torch.Generator().manual_seed(seed)
    left, right = torch.randn(S, rank, generator=generator), torch.randn(rank, W, generator=generator)
    return left / torch.arange(1, rank + 1) @ right


def error(k, factor):
    k, factor = k.double(), factor.double()
    return float((k - k @ factor.T @ factor).norm() / k.norm())


@pytest.mark.parametrize("rank", [1, 5, 20, W])
def test_factor_is_as_good_as_an_svd(rank):
    k = keys()
    found = right_factor(sum(gram_matrix(piece) for piece in k.split(17)), rank)
    assert found.shape == (rank, W)
    assert torch.allclose(found @ found.T, torch.eye(rank), atol=1e-5)
    best = error(k, torch.linalg.svd(k.double(), full_matrices=False)[2][:rank])
    assert error(k, found) == pytest.approx(best, rel=1e-3, abs=1e-5)


def test_most_important_row_comes_first():
    k = keys()
    size = (k @ right_factor(gram_matrix(k), W).T).norm(dim=0)
    assert size.tolist() == sorted(size.tolist(), reverse=True)


@pytest.mark.parametrize("rank", [3, 9])
def test_keys_of_low_rank_come_back(rank):
    assert error(keys(rank), right_factor(gram_matrix(keys(rank)), rank)) < 1e-5


def test_fewer_keys_than_rank_come_back():
    k = keys()[:4]
    assert error(k, right_factor(gram_matrix(k), 11)) < 1e-5


def test_half_precision_is_summed_in_fp32():
    k = keys().bfloat16()
    assert torch.equal(gram_matrix(k), gram_matrix(k.float()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pairs", [[], [(0, 3)], [(0, 4), (0, 1), (2, 2), (2, 4), (2, 0)]])  # head 1 has none
def test_rebuilt_keys_are_the_product_of_their_factors(pairs, dtype):
    generator = torch.Generator().manual_seed(3)
    a, b = torch.randn(5, 4, 7, generator=generator).to(dtype), torch.randn(3, 7, 6, generator=generator).to(dtype)
    heads, chunks = (torch.tensor([pair[i] for pair in pairs], dtype=torch.int64) for i in range(2))
    found = rebuild_keys(a, b, heads, chunks)
    assert found.shape == (len(pairs), 4, 6)
    assert found.dtype == torch.float32
    for keys_of_chunk, (head, chunk) in zip(found, pairs, strict=True):
        for token in range(4):
            expected = a[chunk, token].double() @ b[head].double()
            assert torch.allclose(keys_of_chunk[token].double(), expected, rtol=1e-5, atol=1e-5)
