"""Attention to the former occurrences of a text that repeats, against loops in float64."""

import math

import pytest
import torch

import kvcli.runtime.retrieval_heads as repeats
from kvcli.kernels.softmax import Softmax
from kvcli.runtime.retrieval_heads import repeat_attention

HK, G, D = 2, 3, 8
SOFTMAXES = [Softmax(0.3), Softmax(0.5, softcap=2.0), Softmax(0.3, sinks=torch.linspace(-1, 2, HK * G))]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def score(q, k, softmax):
    product = softmax.scale * sum(a * b for a, b in zip(q.double().tolist(), k.double().tolist(), strict=True))
    return product if softmax.softcap is None else softmax.softcap * math.tanh(product / softmax.softcap)


@pytest.mark.parametrize("softmax", SOFTMAXES)
@pytest.mark.parametrize(("first", "n", "limit"), [(1, 17, 1 << 26), (0, 16, 200), (1, 5, 100), (1, 2, 1)])
def test_repeats_are_summed_over_all_former_occurrences(first, n, limit, softmax, monkeypatch):
    monkeypatch.setattr(repeats, "SCORES_AT_ONCE", limit)
    period, length = 5, 16 + first
    q, k = random(HK * G, n, D), random(HK, length, D, seed=1)
    echo, induction = repeat_attention(q, k, softmax, period, first)
    for head in range(HK * G):
        sums = [0.0, 0.0]
        for row in range(n):
            at = length - n + row
            weights = [math.exp(score(q[head, row], key, softmax)) for key in k[head // G, : at + 1]]
            norm = sum(weights) + (0 if softmax.sinks is None else math.exp(float(softmax.sinks[head])))
            former = [j for j in range(first, at) if (at - j) % period == 0]
            sums[0] += sum(weights[j] for j in former) / norm
            sums[1] += sum(weights[j + 1] for j in former) / norm
        assert [float(echo[head]), float(induction[head])] == pytest.approx(sums, rel=1e-5)


def test_a_text_that_is_not_repeated_yet_has_no_former_occurrences():
    echo, induction = repeat_attention(random(4, 6, D), random(2, 6, D, seed=1), Softmax(1.0), 7, 0)
    assert echo.tolist() == induction.tolist() == [0.0] * 4
