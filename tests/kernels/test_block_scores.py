"""Scores of blocks against float64."""

import pytest
import torch
from block_oracle import entropy

from kvcli.kv.blocks import cosine_scores, density, dot_scores

H, HK, D = 6, 2, 16


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def test_scores_repeat_keys_for_their_groups():
    probe, keys = noise(H, D), noise(9, HK, D)
    repeated = keys.double().repeat_interleave(H // HK, 1).flatten(1)
    flat = probe.double().flatten()
    assert torch.allclose(dot_scores(probe, keys).double(), repeated @ flat, rtol=1e-4, atol=1e-4)
    expected = torch.nn.functional.cosine_similarity(repeated, flat[None])
    assert torch.allclose(cosine_scores(probe, keys).double(), expected, rtol=1e-4, atol=1e-5)
    assert cosine_scores(probe, 0 * keys).abs().max() == 0
    assert len(dot_scores(probe, keys[:0])) == len(cosine_scores(probe, keys[:0])) == 0


def test_density_is_the_entropy_of_the_softmax():
    scores = noise(13)
    assert float(density(scores)) == pytest.approx(entropy(scores.tolist()), rel=1e-5)
