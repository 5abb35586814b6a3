"""Attention with a number of keys of its own for every KV head, against float64 over those keys alone."""

import pytest
import torch

from kvcli.kernels.ragged_attention import ragged_attention, ragged_attention_ref
from kvcli.kernels.softmax import Softmax


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "n", "d"), [(6, 2, 13, 16), (4, 4, 7, 8), (8, 1, 65, 80), (6, 2, 1, 16)])
def test_each_head_attends_to_its_own(heads, kv_heads, n, d, sinks, softcap):
    generator = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(*shape, generator=generator) for shape in ((heads, d), (kv_heads, n, d), (kv_heads, n, d)))
    softmax = Softmax(d**-0.5, softcap, torch.randn(heads, generator=generator) if sinks else None)
    valid = torch.rand(kv_heads, n, generator=generator) < 0.4
    valid[:, 0] = True
    valid[0] = True
    for attend in (ragged_attention, ragged_attention_ref):
        out = attend(q, k, v, valid, softmax)
        for head in range(heads):
            kv = head * kv_heads // heads
            keys, values = k[kv, valid[kv]].double(), v[kv, valid[kv]].double()
            scores = keys @ q[head].double() / d**0.5
            scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
            scores = torch.cat((scores, softmax.sinks[head].double()[None])) if sinks else scores
            expected = scores.softmax(0)[: len(keys)] @ values
            assert torch.allclose(out[head].double(), expected, rtol=1e-4, atol=1e-5)
