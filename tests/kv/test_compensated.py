"""The token that stands for those dropped, against loops in float64."""

import math

import pytest
import torch

from kvcli.kernels.softmax import Softmax
from kvcli.kv.compensated import compensated_attention

HK, G, D = 2, 3, 8
SOFTMAXES = [Softmax(0.3), Softmax(0.5, softcap=2.0), Softmax(0.3, sinks=torch.linspace(-1, 2, HK * G))]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def score(q, k, softmax):
    product = softmax.scale * sum(a * b for a, b in zip(q.double().tolist(), k.double().tolist(), strict=True))
    return product if softmax.softcap is None else softmax.softcap * math.tanh(product / softmax.softcap)


@pytest.mark.parametrize("softmax", SOFTMAXES)
@pytest.mark.parametrize("count", [1, 37])
def test_the_mean_token_weighs_as_many_tokens_as_it_stands_for(count, softmax):
    n = 13
    q, k, v = random(HK * G, D), random(HK, n, D, seed=1), random(HK, n, D, seed=2)
    mean_k, mean_v = random(HK, D, seed=3), random(HK, D, seed=4)
    out = compensated_attention(q, k, v, mean_k, mean_v, count, softmax)
    for head in range(HK * G):
        kv = head // G
        weights = [math.exp(score(q[head], key, softmax)) for key in k[kv]]
        weights.append(count * math.exp(score(q[head], mean_k[kv], softmax)))
        values = [*v[kv].double(), mean_v[kv].double()]
        norm = sum(weights) + (0 if softmax.sinks is None else math.exp(float(softmax.sinks[head])))
        expected = sum(weight * value for weight, value in zip(weights, values, strict=True)) / norm
        assert torch.allclose(out[head].double(), expected, rtol=1e-5, atol=1e-6)
