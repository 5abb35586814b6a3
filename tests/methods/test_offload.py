"""Offloading against full attention in float64, written out, sharing no code with it."""

import math
from dataclasses import replace

import pytest
import torch
from driver import HK, SOFTMAX, D, H
from engine import new_method

from kvcli.kernels import _numba
from kvcli.kv import dense as recent_tokens
from kvcli.kv.dense import TokenMajorCache
from kvcli.memory.tiers import Footprint
from kvcli.models.geometry import LayerGeometry

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
WIDE = 3  # KV heads of the middle layer, which has more of them


def attention(q, k, v):
    """q [H, d] over k, v [Hk, n, d], one head at a time."""
    out = []
    for head, query in enumerate(q.double()):
        keys, values = (x[head // (len(q) // len(k))].double() for x in (k, v))
        weights = [math.exp(float(query @ key) / math.sqrt(D)) for key in keys]
        out.append(sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights))
    return torch.stack(out)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("prompt", [1, 37])
def test_every_layer_and_step_is_full_attention_whatever_lay_in_the_buffers(prompt, device):
    steps, heads = 110, [HK, WIDE, HK, HK]
    layers = [LayerGeometry(i, H, count, D, 10 if i == 2 else None, True) for i, count in enumerate(heads)]
    method = new_method("offload", {}, layers, prompt + steps + 3, device=device)
    for buffer in method.prefetchers[0].buffers:
        assert (device == "cpu") == (buffer.numel() == 0)
        buffer.fill_(float("nan"))
    generator = torch.Generator().manual_seed(prompt)
    kv = [torch.randn(2, count, prompt + steps, D, generator=generator) for count in heads]
    for layer, tokens in enumerate(kv):
        lent = tokens[:, :, :prompt].to(device, copy=True)
        method.prefill(layer, *lent, torch.empty(H, 0, D, device=device), SOFTMAX)
        lent.fill_(float("nan"))  # the caller uses it again
    for at in range(prompt, prompt + steps):
        method.context.counters.next_step()
        for layer, (k, v) in enumerate(kv):
            q = torch.randn(H, D, generator=generator)
            out = method.attend(layer, *(x.to(device) for x in (q, k[:, at], v[:, at])), SOFTMAX)
            if layer != 2:
                expected = attention(q, k[:, : at + 1], v[:, : at + 1])
                assert torch.allclose(out.cpu().double(), expected, rtol=1e-4, atol=1e-5), f"layer {layer}, token {at}"
                assert method.attended(layer).all()
    moved = sum(2 * 4 * D * count * (at + 1) for count in (HK, WIDE, HK) for at in range(prompt, prompt + steps))
    cache = method.context.counters.cache()
    assert cache.bytes_to_device == moved
    newest = 2 * 4 * D * (HK + WIDE + HK)
    assert cache.bytes_exposed == steps * newest + prompt * 2 * 4 * D * HK, (
        "the first layer of the first step comes whole"
    )
    assert cache.bytes_to_host == 2 * 4 * D * (HK + WIDE + HK) * (prompt + steps)
    assert [row.bytes_to_device > 0 for row in cache.layers] == [True, True, False, True]


@pytest.mark.parametrize("count", [1, 5])
def test_the_device_holds_two_layers_and_the_host_all(count):
    layers = [LayerGeometry(index, H, HK, D, None, True) for index in range(count)]
    of_a_layer = 2 * HK * 100 * D * 4
    planned = new_method("offload", {}, layers, 100, device="meta").footprint()
    assert planned == Footprint(2 * of_a_layer, count * of_a_layer)


def test_one_memory_holds_all_once_unless_it_is_rounded():
    layers = [LayerGeometry(index, H, HK, D, None, True) for index in range(3)]
    assert new_method("offload", {}, layers, 100).footprint() == Footprint(0, 3 * 2 * HK * 100 * D * 4)
    rounded = new_method("offload", {"kv_dtype": "int8"}, layers, 100)
    assert [buffer.numel() for buffer in rounded.prefetchers[0].buffers] == [2 * HK * 100 * D] * 2


def test_a_model_of_sliding_windows_has_nothing_to_bring():
    layers = [LayerGeometry(index, H, HK, D, 8, True) for index in range(2)]
    assert new_method("offload", {}, layers, 100).footprint().host == 0


def test_no_tokens_of_rounded_kv_are_read_as_none():
    tiers = replace(
        new_method("offload", {}, [LayerGeometry(0, H, HK, D, None, True)], 9).context.tiers, kv_dtype="int8"
    )
    target = torch.zeros(2, 4, HK, D)
    TokenMajorCache(HK, D, 4, tiers, offload=True).read(slice(0, 0), target)
    assert not target.any()


@pytest.mark.parametrize("held", ["int8", "k8v4", "int4"])
def test_bytes_read_where_they_lie_are_those_made_numbers_first(held, monkeypatch):
    """Also behind tokens that were taken back; rows that no token has reached would make everything NaN."""
    monkeypatch.setattr(_numba, "LEAST", 1)
    monkeypatch.setattr(recent_tokens, "RECENT", 8)
    layers = [LayerGeometry(index, H, HK, D, None, True) for index in range(2)]
    generator = torch.Generator().manual_seed(0)
    prompt, steps = torch.randn(2, HK, 37, D, generator=generator), torch.randn(9, 2, HK, D, generator=generator)
    found = []
    for in_place in (True, False):
        with monkeypatch.context() as patch:
            if not in_place:
                patch.setattr(TokenMajorCache, "reads_in_place", lambda *_: False)
            method = new_method("offload", {"kv_dtype": held}, layers, 60)
            for cache in method.caches:
                cache.kv.fill_(255)
            for buffer in method.prefetchers[0].buffers:
                buffer.fill_(float("nan"))
            for layer in range(2):
                method.prefill(layer, *prompt, torch.empty(H, 0, D), SOFTMAX)
            outs = []
            for at, (k, v) in enumerate(steps):
                if at == 6:
                    for cache in method.caches:
                        cache.rewind(33)
                method.context.counters.next_step()
                assert at == 6 or method.caches[0].reads_in_place(k.new_zeros(H, D)) == in_place
                outs += [method.attend(layer, torch.ones(H, D) * at / D, k, v, SOFTMAX) for layer in range(2)]
            found.append((torch.stack(outs), method.context.counters.cache().bytes_to_device))
    (mine, moved), (other, counted) = found
    torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)
    assert moved == counted


@pytest.mark.parametrize("held", ["auto", "int8"])
def test_in_one_memory_the_tokens_of_a_head_lie_together(held):
    """Where a bus lies between, those of all heads do, and what is rounded is read by token."""
    method = new_method("offload", {"kv_dtype": held}, [LayerGeometry(0, H, HK, D, None, True)], 9)
    kv = method.retrieval[0].kv
    assert kv.shape[:3] == ((2, 9, HK) if held == "auto" else (1, 9, HK))
    assert kv.is_contiguous() == (held == "int8")
    apart = new_method("offload", {"kv_dtype": held}, [LayerGeometry(0, H, HK, D, None, True)], 9, device="meta")
    assert apart.retrieval[0].kv.is_contiguous()
