"""The newest tokens as they were made, beside all of them rounded in host memory; against a list of tokens."""

from dataclasses import replace

import pytest
import torch
from driver import storage_bytes

from kvcli.kv import dense as recent_tokens
from kvcli.kv.cache import Tiers
from kvcli.kv.dense import TokenMajorCache
from kvcli.memory.tiers import Footprint
from kvcli.methods.offload import LayerPrefetcher

HK, D, CAPACITY, RECENT = 2, 16, 60, 8
CPU, META = (Tiers.for_device(torch.device(name), torch.float32) for name in ("cpu", "meta"))


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(recent_tokens, "RECENT", RECENT)


def made(tiers=CPU):
    return TokenMajorCache(HK, D, CAPACITY, replace(tiers, kv_dtype="int4"), offload=True)


def tokens(count, seed=0):
    return torch.randn(2, HK, count, D, generator=torch.Generator().manual_seed(seed)).unbind()


def assert_held(cache, k, v, near):
    """All tokens [Hk, n, d] are there, those `near` as they were made and the others rounded, by both ways to them."""
    prefetcher = LayerPrefetcher(CAPACITY, HK * D, CPU)
    prefetcher.prefetch(cache)
    for found in (cache.fetch(), prefetcher.fetch(cache)):
        for part, (mine, x) in enumerate(zip(found, (k, v), strict=False)):
            wanted = cache.format.rounded(x[..., None, :], part, cache.sizes[:, None, None])[..., 0, :]
            assert not torch.equal(wanted, x)
            wanted[:, near] = x[:, near]
            assert torch.equal(mine, wanted)


@pytest.mark.parametrize("parts", [[20], [3, 20], [3, 7, 20]])
def test_the_newest_tokens_of_a_prompt_and_all_that_follow_stay_as_they_were_made(parts):
    k, v = tokens(33)
    cache = made()
    for stop in parts[:-1]:
        cache.take(k[:, :stop], v[:, :stop])
    cache.load(k[:, :20], v[:, :20])
    assert_held(cache, k[:, :20], v[:, :20], slice(12, 20))
    for at in range(20, 33):
        cache.append(k[:, at], v[:, at])
        assert_held(cache, k[:, : at + 1], v[:, : at + 1], slice(at + 1 - RECENT, at + 1))


@pytest.mark.parametrize(("back", "near"), [(24, slice(22, 24)), (21, slice(21, 21))])
def test_tokens_that_are_taken_back_are_forgotten(back, near):
    """What the ring held before them is gone: those tokens are as the host has them."""
    k, v = tokens(30)
    cache = made()
    cache.load(k[:, :30], v[:, :30])  # the ring has 22 to 29
    cache.rewind(back)
    assert_held(cache, k[:, :back], v[:, :back], near)
    other_k, other_v = tokens(3, seed=1)
    cache.append_window(other_k, other_v)
    k, v = (torch.cat((x[:, :back], more), 1) for x, more in ((k, other_k), (v, other_v)))
    assert_held(cache, k, v, slice(min(near.start, back), back + 3))


def test_they_are_counted_on_the_device():
    held = made().footprint()
    assert held == made(META).footprint()
    assert held.device == RECENT * HK * D * 2 * 4 + HK * D * 4  # and the sizes of channels
    assert held == Footprint(device=held.device, host=CAPACITY * HK * made().format.bytes)
    assert storage_bytes([made().recent.kv, made().sizes]) == held.device
