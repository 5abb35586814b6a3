"""Four-bit keys, and attention with a number of keys of its own for every KV head, against loops in float64."""

import itertools
import math

import pytest
import torch

from kvcli.kernels import _triton
from kvcli.kernels.softmax import Softmax
from kvcli.methods.twilight.cache import ragged_attention
from kvcli.methods.twilight.kernels import four_bit_scores, quantise_four_bit

HK, G = 2, 3


def noise(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


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


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "n", "d"), [(6, 2, 13, 16), (4, 4, 7, 8), (8, 1, 65, 80), (6, 2, 1, 16)])
def test_each_head_attends_to_its_own(heads, kv_heads, n, d, sinks, softcap, by_kernel, monkeypatch):
    monkeypatch.setattr(_triton, "on_cpu", by_kernel)
    generator = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(*shape, generator=generator) for shape in ((heads, d), (kv_heads, n, d), (kv_heads, n, d)))
    softmax = Softmax(d**-0.5, softcap, torch.randn(heads, generator=generator) if sinks else None)
    valid = torch.rand(kv_heads, n, generator=generator) < 0.4
    valid[:, 0] = True
    valid[0] = True
    out = ragged_attention(q, k, v, valid, softmax)
    for head in range(heads):
        kv = head * kv_heads // heads
        keys, values = k[kv, valid[kv]].double(), v[kv, valid[kv]].double()
        scores = keys @ q[head].double() / d**0.5
        scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
        scores = torch.cat((scores, softmax.sinks[head].double()[None])) if sinks else scores
        expected = scores.softmax(0)[: len(keys)] @ values
        assert torch.allclose(out[head].double(), expected, rtol=1e-4, atol=1e-5)
