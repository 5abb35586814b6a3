"""The last rows of attention against loops in float64."""

import math

import pytest
import torch

import kvcli.kernels.prefill_attention as module
from kvcli.kernels.prefill_attention import last_rows
from kvcli.kernels.softmax import Softmax

HK, G, D = 2, 3, 8


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [1, 4, 13])
@pytest.mark.parametrize("softmax", [Softmax(0.3), Softmax(0.5, softcap=2.0), Softmax(0.3, sinks=random(HK * G))])
def test_weights_follow_the_formula(rows, softmax, monkeypatch):
    monkeypatch.setattr(module, "KEYS_AT_ONCE", 5)
    length = 13
    q, k = random(HK * G, rows, D, seed=1), random(HK, length, D, seed=2)
    found = last_rows(q, k, softmax)
    assert found.shape == (HK * G, rows, length)
    for head in range(HK * G):
        for row in range(rows):
            seen = length - rows + row + 1
            scores = []
            for key in k[head // G, :seen].double().tolist():
                score = softmax.scale * sum(a * b for a, b in zip(q[head, row].double().tolist(), key, strict=True))
                scores.append(
                    score if softmax.softcap is None else softmax.softcap * math.tanh(score / softmax.softcap)
                )
            total = sum(math.exp(score) for score in scores)
            if softmax.sinks is not None:
                total += math.exp(float(softmax.sinks[head]))
            expected = [math.exp(score) / total for score in scores] + [0.0] * (length - seen)
            assert found[head, row].tolist() == pytest.approx(expected, rel=1e-5)
