"""Running moments and the probe that ActQKV makes with them, against loops in float64."""

import pytest
import torch
from block_oracle import moments, weighted_probe

from kvcli.methods.actqkv import activation_probe, merge_moments, moments_of


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_merged_moments_are_those_of_two_passes(offset):
    parts = [noise(n, 11, seed=n) * (1 + n) + offset for n in (1, 7, 1, 64, 3)]
    merged = moments_of(parts[0])
    seen = parts[0]
    for part in parts[1:]:
        merged, seen = merge_moments(merged, moments_of(part)), torch.cat((seen, part))
        mean, variance = moments(seen.double().tolist())
        assert merged.seen == len(seen)
        assert torch.allclose(merged.mean.double(), torch.tensor(mean, dtype=torch.float64), rtol=1e-5, atol=1e-5)
        assert torch.allclose(merged.variance.double(), torch.tensor(variance, dtype=torch.float64), rtol=1e-4)


def test_half_precision_is_summed_in_full():
    assert moments_of(noise(5, 3).bfloat16()).m2.dtype == torch.float32


@pytest.mark.parametrize("n", [1, 2, 9])
def test_probe_weighs_by_distance_from_the_mean(n):
    queries = noise(n, 12)
    mean, variance = moments(queries.double().tolist())
    expected = weighted_probe(queries.double().tolist(), mean, variance)
    probe = activation_probe(queries, moments_of(queries))
    assert torch.allclose(probe.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=1e-5)


def test_probe_follows_the_outlier():
    queries = 0.01 * noise(50, 12) + 1
    queries[17] = -torch.arange(12.0)
    assert torch.allclose(activation_probe(queries, moments_of(queries)), queries[17], rtol=0.05, atol=0.1)
    assert torch.allclose(queries.mean(0), torch.ones(12), atol=0.3)  # while a plain mean hardly notices it


@pytest.mark.parametrize("n", [1, 2, 9])
def test_in_reverse_what_is_usual_weighs_more(n):
    queries = noise(n, 12, seed=3)
    mean, variance = moments(queries.double().tolist())
    bias = [
        sum((x - m) ** 2 / (s + 1e-6) for x, m, s in zip(row, mean, variance, strict=True))
        for row in queries.double().tolist()
    ]
    weights = [1 / (each + 1e-6) for each in bias]
    expected = [
        sum(w * x for w, x in zip(weights, column, strict=True)) / sum(weights)
        for column in zip(*queries.double().tolist(), strict=True)
    ]
    probe = activation_probe(queries, moments_of(queries), reverse=True)
    assert torch.allclose(probe.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-3, atol=1e-5)
