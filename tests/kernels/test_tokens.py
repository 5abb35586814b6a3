"""Kernels that quantise keys to bits and score by them, against loops in float64."""

import math

import pytest
import torch

from kvcli.methods.fier.kernels import one_bit_scores, quantise_keys

HK, G = 2, 3


def keys(groups, size, d, dtype=torch.float32):
    return torch.randn(HK, groups, size, d, generator=torch.Generator().manual_seed(groups)).to(dtype)


def dequantised(k):
    """Every key as code * s + z, by channel and group, in plain loops; the bits beside it."""
    heads, groups, _, d = k.shape
    values, bits = torch.zeros(k.shape, dtype=torch.float64), torch.zeros(k.shape, dtype=torch.bool)
    for head in range(heads):
        for group in range(groups):
            for c in range(d):
                channel = k[head, group, :, c].tolist()
                z = torch.tensor((max(channel) + min(channel)) / 2).to(k.dtype).item()
                s = torch.tensor((max(channel) - min(channel)) / 2).to(k.dtype).item()
                for t, value in enumerate(channel):
                    bits[head, group, t, c] = value >= z
                    values[head, group, t, c] = z + s if value >= z else z - s
    return values, bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "d"), [(5, 8), (32, 13), (1, 16), (7, 3)])
def test_codes_are_signs_about_the_middle_eight_to_a_byte(dtype, size, d):
    k = keys(3, size, d, dtype)
    codes, ranges = quantise_keys(k)
    assert codes.shape == (HK, 3, size, math.ceil(d / 8))
    assert (codes.dtype, ranges.dtype) == (torch.uint8, dtype)
    _, bits = dequantised(k)
    for c in range(d):
        assert torch.equal((codes[..., c // 8] >> c % 8) & 1 == 1, bits[..., c])
    spare = codes[..., -1].int() >> ((d - 1) % 8 + 1)
    assert not spare.any(), "bits of no channel are not set"


def test_a_key_in_the_middle_counts_as_above():
    k = torch.tensor([-1.0, 0.0, 1.0]).view(1, 1, 3, 1)
    codes, ranges = quantise_keys(k)
    assert codes.flatten().tolist() == [0, 1, 1]
    assert ranges.flatten().tolist() == [1.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "d"), [(5, 8), (32, 13), (8, 64)])
def test_scores_are_those_of_the_dequantised_keys(dtype, size, d):
    k = keys(4, size, d, dtype)
    q = torch.randn(HK, G, d, generator=torch.Generator().manual_seed(7)).to(dtype)
    found = one_bit_scores(q, *quantise_keys(k))
    values, _ = dequantised(k)
    expected = torch.einsum("hgd,hntd->hgnt", q.double(), values).flatten(2)
    error = (found.double() - expected).norm() / expected.norm()
    assert found.shape == (HK, G, 4 * size)
    assert error < 1e-6


def test_no_group_no_scores():
    assert one_bit_scores(torch.ones(HK, G, 8), *quantise_keys(keys(1, 4, 8)[:, :0])).shape == (HK, G, 0)


def test_quantised_keys_take_an_eighth_at_groups_of_32_in_16_bits():
    k = keys(3, 32, 64, torch.bfloat16)
    codes, ranges = quantise_keys(k)
    assert codes.nbytes + ranges.nbytes == k.nbytes / 8
