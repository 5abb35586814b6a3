"""Kernels that digest pages, quantise to four bits, score tokens and cut by mass, against loops in float64."""

import itertools
import math

import pytest
import torch

from kvcli.kernels.cuboid_digest import cuboid_digest
from kvcli.kernels.four_bit_keys import four_bit_scores, quantise_four_bit
from kvcli.kernels.nucleus import nucleus
from kvcli.kernels.token_scores import token_scores

HK, G = 2, 3


def noise(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_digest_is_a_cuboid_about_the_middle_with_the_mean_distance():
    keys = noise(HK, 5, 7, 6)
    digest = cuboid_digest(keys)
    assert digest.shape == (HK, 5, 2, 6)
    for head, page, channel in itertools.product(range(HK), range(5), range(6)):
        values = keys[head, page, :, channel].double().tolist()
        centre = (max(values) + min(values)) / 2
        radius = sum(abs(value - centre) for value in values) / len(values)
        assert digest[head, page, :, channel].tolist() == pytest.approx([centre + radius, centre - radius], abs=1e-6)


@pytest.mark.parametrize("channels", [1, 5, 8])
def test_token_scores_use_the_first_channels_only(channels):
    q, keys = noise(HK * G, 8, seed=1), noise(HK, 11, channels, seed=2)
    found = token_scores(q, keys, 0.3)
    assert found.shape == (HK, G, 11)
    for head, g, t in itertools.product(range(HK), range(G), range(11)):
        pairs = zip(q[head * G + g, :channels].tolist(), keys[head, t].tolist(), strict=True)
        assert found[head, g, t].item() == pytest.approx(0.3 * sum(a * b for a, b in pairs), abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("d", [1, 8, 13])
def test_four_bit_scores_are_those_of_the_dequantised_keys(dtype, d):
    keys, q = noise(HK, 9, d, dtype=dtype), noise(HK, G, d, seed=3, dtype=dtype)
    codes, ranges = quantise_four_bit(keys)
    assert (codes.shape, codes.dtype, ranges.dtype) == ((HK, 9, math.ceil(d / 2)), torch.uint8, dtype)
    found = four_bit_scores(q, codes, ranges)
    for head, t in itertools.product(range(HK), range(9)):
        values = keys[head, t].double().tolist()
        scale = torch.tensor((max(values) - min(values)) / 15).to(dtype).item()
        meant = [min(values) + scale * (min(15, round((x - min(values)) / scale)) if scale else 0) for x in values]
        step = (max(values) - min(values)) / 15
        assert all(abs(a - b) <= 0.6 * step + 1e-6 for a, b in zip(meant, values, strict=True))
        for g in range(G):
            expected = sum(a * b for a, b in zip(q[head, g].double().tolist(), meant, strict=True))
            # a value half-way between two codes may round to either
            assert found[head, g, t].item() == pytest.approx(expected, abs=1e-4 + 0.02 * (dtype == torch.bfloat16))


def test_equal_channels_quantise_without_a_range():
    codes, ranges = quantise_four_bit(torch.full((1, 2, 6), 0.7))
    assert not codes.any()
    scores = four_bit_scores(torch.ones(1, 1, 6), codes, ranges)
    assert torch.allclose(scores, torch.full((1, 1, 2), 4.2))


@pytest.mark.parametrize("p", [0.05, 0.3, 0.6, 0.85, 0.99])
@pytest.mark.parametrize("sharpness", [0.1, 1.0, 6.0])
def test_nucleus_is_the_least_set_that_holds_the_mass(p, sharpness):
    weights = (sharpness * noise(HK, G, 40, seed=5)).softmax(-1)
    always = torch.zeros(40, dtype=torch.bool)
    always[[0, 1, 38, 39]] = True
    kept = nucleus(weights, always, p)
    for head, g in itertools.product(range(HK), range(G)):
        row = weights[head, g].double().tolist()
        chosen = {0, 1, 38, 39}
        for j in sorted(range(2, 38), key=lambda j: (-row[j], j)):
            if sum(row[i] for i in chosen) >= p:
                break
            chosen.add(j)
        assert set(kept[head, g].nonzero().flatten().tolist()) == chosen


def test_the_ends_and_ties_of_the_nucleus():
    weights, never = torch.full((1, 10), 0.1), torch.zeros(10, dtype=torch.bool)
    assert nucleus(weights, never, 1.0).all()
    assert nucleus(weights, never, 0.25).nonzero()[:, 1].tolist() == [0, 1, 2]
    assert nucleus(weights, never, 0.0).sum() == 0
    assert nucleus(weights, ~never, 0.0).all()
