"""Attention over near and far keys against the formula, token by token in float64."""

import math

import pytest
import torch

from kvcli.kernels import _numba
from kvcli.kernels.prefill_attention import FarTokens, far_near_attention, one_query, one_query_suits
from kvcli.kernels.softmax import Softmax

H, HK, D = 4, 2, 16


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("m", "n", "f"), [(1, 1, 0), (1, 37, 5), (7, 7, 0), (7, 23, 41), (13, 14, 1)])
def test_far_and_near_attention_follow_the_formula(m, n, f, sinks, softcap, monkeypatch):
    q, p, k, v = noise(H, m, D), noise(H, m, D, seed=1), noise(HK, n, D), noise(HK, n, D, seed=2)
    far = FarTokens(p, noise(HK, f, D, seed=3), noise(HK, f, D, seed=4))
    softmax = Softmax(0.7, softcap, noise(H) if sinks else None)
    results = [far_near_attention(q, k, v, far, softmax)]
    if m == 1 and f and _numba.numba is not None:  # the far keys in two parts, the second one among poison
        among = [torch.full((HK, 2 * f, D), math.nan) for _ in range(2)]
        rows = torch.arange(2 * f).flip(0)[None, 1::2][:, : f - 2]
        for held, own in zip(among, far[1:3], strict=True):
            held[:, rows[0]] = own[:, 2:]
        parts = [FarTokens(p, far.k[:, :2], far.v[:, :2]), FarTokens(p, *among, rows)]
        monkeypatch.setattr(_numba, "LEAST", 1)
        assert one_query_suits(q, k, v)
        results.append(one_query(q, k, v, parts, softmax))
    q, k, v, far_q, far_k, far_v = (x.double() for x in (q, k, v, *far[:3]))
    expected_mass = torch.zeros(n, dtype=torch.float64)
    for h in range(H):
        kv = h // (H // HK)
        for i in range(m):
            at = n - m + i
            logits = softmax.scores(torch.cat((k[kv, : at + 1] @ q[h, i], far_k[kv] @ far_q[h, i])))
            if sinks:
                logits = torch.cat((logits, softmax.sinks[h : h + 1].double()))
            weights = logits.softmax(0)[: at + 1 + f]
            expected = weights @ torch.cat((v[kv, : at + 1], far_v[kv]))
            for out, _ in results:
                assert torch.allclose(out[h, i].double(), expected, rtol=1e-4, atol=1e-5)
            expected_mass[:at] += weights[:at]
    for _, mass in results:
        assert torch.allclose(mass.double(), expected_mass, rtol=1e-4, atol=1e-5)
