"""Indexes of single tokens other than one-bit keys: what they hold, score, and move."""

import pytest
import torch

from kvcli.kernels.softmax import Softmax
from kvcli.kv.cache import Tiers
from kvcli.kv.pages import PageBudget
from kvcli.kv.tokens import ChannelScoredCache, OffloadedTokenCache, PartialKeyIndex, PrincipalAxesCache, TokenBudget
from kvcli.memory.tiers import Traffic
from kvcli.methods.twilight.cache import Int4EstimateCache, OffloadedInt4EstimateCache

HK, G, D, CAPACITY, LENGTH = 2, 3, 8, 60, 47
CPU, META = (Tiers.for_device(torch.device(name), torch.float32) for name in ("cpu", "meta"))
BUDGET = TokenBudget(20, 2, 5, 1)
PAGES = PageBudget.of(budget=24, sink=4, window=8, page_size=4)
TOKEN = HK * 2 * D * 4

CACHES = {
    "keyed": lambda tiers: ChannelScoredCache(HK, D, CAPACITY, BUDGET, 3, tiers),
    "principal": lambda tiers: PrincipalAxesCache(HK, D, CAPACITY, BUDGET, 3, tiers),
    "projected": lambda tiers: OffloadedTokenCache(
        HK, D, CAPACITY, BUDGET, PartialKeyIndex(HK, D, 3, CAPACITY, tiers), tiers
    ),
    "weighed": lambda tiers: Int4EstimateCache(HK, D, CAPACITY, PAGES, tiers),
    "recalled": lambda tiers: OffloadedInt4EstimateCache(HK, D, CAPACITY, PAGES, tiers),
}


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", CACHES)
def test_footprint_counts_what_is_allocated_even_on_meta(name):
    real, planned = (CACHES[name](tiers).footprint() for tiers in (CPU, META))
    assert real == planned
    estimates = HK * 15 * 2 * D * 4 + HK * CAPACITY * (D // 2 + 2 * 4)  # bounds of pages, and four-bit keys
    device, host = {
        "keyed": (CAPACITY * TOKEN, 0),
        "principal": (CAPACITY * TOKEN + HK * D * D * 4, 0),
        "projected": (20 * TOKEN + HK * 13 * 8 + HK * (D * 3 + CAPACITY * 3) * 4, CAPACITY * TOKEN),
        "weighed": (CAPACITY * TOKEN + estimates, 0),
        "recalled": (24 * TOKEN + HK * 3 * 8 + estimates, CAPACITY * TOKEN),
    }[name]
    assert (real.device, real.host) == (device, host)


@pytest.mark.parametrize("name", CACHES)
def test_traffic_of_a_step(name):
    cache = CACHES[name](META)
    short = 24 if name in ("weighed", "recalled") else 20
    assert cache.traffic(short) == Traffic(attended=short * TOKEN)
    candidates = LENGTH - 2 - 5
    three_channels = HK * candidates * 3 * 4
    pages, weighed = 12 - 1 - 2, 23  # of 12 pages, the last with 3 tokens
    four_bits = HK * weighed * (D // 2 + 2 * 4)
    assert (
        cache.traffic(LENGTH)
        == {
            "keyed": Traffic(20 * TOKEN, three_channels, 4 * HK * candidates),
            "principal": Traffic(20 * TOKEN, three_channels, 4 * HK * candidates),
            "projected": Traffic(20 * TOKEN, three_channels, 4 * HK * candidates, recalled=13 * TOKEN),
            "weighed": Traffic(weighed * TOKEN, HK * pages * 2 * D * 4 + four_bits, 4 * HK * (pages + weighed)),
            "recalled": Traffic(
                weighed * TOKEN, HK * pages * 2 * D * 4 + four_bits, 4 * HK * (pages + weighed), recalled=3 * 4 * TOKEN
            ),
        }[name]
    )


def test_projected_keys_score_by_their_columns():
    index = PartialKeyIndex(HK, D, 3, CAPACITY, CPU)
    index.basis.copy_(torch.linalg.qr(noise(HK, D, D))[0][..., :3])
    keys, q = noise(HK, LENGTH, D, seed=1), noise(HK * G, D, seed=2)
    index.fill(0, keys[:, :40])
    index.fill(40, keys[:, 40:])
    found = index.scores(q, range(5, LENGTH), 0.3, "none").view(HK, G, -1)
    projected = index.basis.double() @ index.basis.double().transpose(1, 2)
    expected = 0.3 * q.view(HK, G, D).double() @ projected @ keys[:, 5:].double().transpose(1, 2)
    assert torch.allclose(found.double(), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_in_their_axes_attend_as_they_are(dtype):
    tiers = Tiers.for_device(torch.device("cpu"), dtype)
    plain, turned = (
        ChannelScoredCache(HK, D, CAPACITY, BUDGET, D, tiers),
        PrincipalAxesCache(HK, D, CAPACITY, BUDGET, D, tiers),
    )
    turned.axes.copy_(torch.linalg.qr(noise(HK, D, D))[0])
    k, v = noise(HK, LENGTH, D, seed=1).to(dtype), noise(HK, LENGTH, D, seed=2).to(dtype)
    for cache in (plain, turned):
        cache.load(k[:, :40], v[:, :40])
        for at in range(40, LENGTH):
            cache.append(k[:, at], v[:, at])
    q, softmax = noise(HK * G, D, seed=3).to(dtype), Softmax(D**-0.5)
    rounding = 1e-5 if dtype == torch.float32 else 0.05
    here, there = plain.attend(q, softmax), turned.attend(turned.to_axes(q), softmax)
    assert torch.allclose(here.float(), there.float(), atol=rounding)
    candidates = range(2, LENGTH - 5)
    here, there = plain.index.scores(q, candidates, 1.0), turned.index.scores(turned.to_axes(q), candidates, 1.0)
    assert torch.allclose(here, there, atol=20 * rounding, rtol=rounding)


def test_pages_spread_to_tokens_between_sink_and_window():
    cache = CACHES["weighed"](CPU)
    cache.load(noise(HK, LENGTH, D), noise(HK, LENGTH, D))
    tokens, always = cache.tokens_of(torch.tensor([[3, 1, 5], [9, 2, 4]]))
    sink, window = [0, 1, 2, 3], list(range(40, LENGTH))
    inside = [[12, 13, 14, 15, 4, 5, 6, 7, 20, 21, 22, 23], [36, 37, 38, 39, 8, 9, 10, 11, 16, 17, 18, 19]]
    assert tokens.tolist() == [[*sink, *row, *window] for row in inside]
    assert always.tolist() == [True] * 4 + [False] * 12 + [True] * 7


@pytest.mark.parametrize("name", ["weighed", "recalled"])
def test_attention_to_kept_tokens_leaves_the_others_out(name):
    cache, softmax = CACHES[name](CPU), Softmax(D**-0.5)
    k, v, q = noise(HK, LENGTH, D, seed=1), noise(HK, LENGTH, D, seed=2), noise(HK * G, D, seed=3)
    cache.load(k, v)
    assert cache.attended().all()
    pages = torch.tensor([[3, 1, 5], [9, 2, 4]])
    if name == "recalled":
        cache.recall(torch.tensor([[5, 7, 1], [4, 9, 8]]))  # then some are there, in other slots than those named first
        cache.recall(pages)
    tokens, _ = cache.tokens_of(pages)
    kept = noise(*tokens.shape, seed=4) > 0.5
    kept[:, -1] = True
    out = cache.attend_tokens(q, tokens, kept, softmax)
    mask = cache.attended()
    for head in range(HK):
        chosen = sorted(tokens[head, kept[head]].tolist())
        assert mask[head].nonzero().flatten().tolist() == chosen
        weights = (q[head * G : head * G + G].double() @ k[head, chosen].double().T / D**0.5).softmax(-1)
        expected = weights @ v[head, chosen].double()
        assert torch.allclose(out[head * G : head * G + G].double(), expected, atol=1e-5)
