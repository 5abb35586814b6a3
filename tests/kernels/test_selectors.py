"""Scores of single tokens, and the tokens that an eviction keeps, against loops."""

import itertools

import pytest
import torch

from kvcli.kernels.token_scores import token_scores
from kvcli.kernels.topk import kept_tokens

HK, G = 2, 3


def noise(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("channels", [1, 5, 8])
def test_token_scores_use_the_first_channels_only(channels):
    q, keys = noise(HK * G, 8, seed=1), noise(HK, 11, channels, seed=2)
    found = token_scores(q, keys, 0.3)
    assert found.shape == (HK, G, 11)
    for head, g, t in itertools.product(range(HK), range(G), range(11)):
        pairs = zip(q[head * G + g, :channels].tolist(), keys[head, t].tolist(), strict=True)
        assert found[head, g, t].item() == pytest.approx(0.3 * sum(a * b for a, b in pairs), abs=1e-5)


@pytest.mark.parametrize("recent", [0, 1, 4, 9])
@pytest.mark.parametrize("k", [9, 10, 20])
def test_kept_tokens_are_the_newest_and_the_best(recent, k):
    scores = noise(HK, 20 - recent, seed=7).mul(2).round()  # with ties
    found = kept_tokens(scores, recent, k)
    for head in range(HK):
        ranked = sorted(range(20 - recent), key=lambda token: (-scores[head, token].item(), token))
        assert found[head].tolist() == sorted([*ranked[: k - recent], *range(20 - recent, 20)])
