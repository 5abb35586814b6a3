"""Caches that drop tokens for good, against lists of tokens."""

import pytest
import torch
from driver import storage_bytes

from kvcli.kernels.softmax import Softmax
from kvcli.kv.cache import Tiers
from kvcli.kv.pruned import EvictingCache, PrunedCache
from kvcli.memory.tiers import Footprint

HK, D, CAPACITY = 2, 8, 60
TIERS = Tiers.for_device(torch.device("cpu"), torch.float32)
META = Tiers.for_device(torch.device("meta"), torch.float32)
SOFTMAX = Softmax(D**-0.5)
KV, POSITION, SCORE = 2 * D * 4, 4, 4  # bytes of one token of one KV head


def tokens(count):
    return torch.randn(2, HK, count, D, generator=torch.Generator().manual_seed(count)).unbind()


def check(cache, k, v, held, at):
    """Hold the cache's attention against that over a list of tokens for each KV head."""
    q = torch.randn(HK, 2, D, generator=torch.Generator().manual_seed(at))
    out = cache.attend(q.view(2 * HK, D), SOFTMAX).view(HK, 2, D)
    for head, mine in enumerate(held):
        weights = (q[head] @ k[head, mine].T * SOFTMAX.scale).softmax(-1)
        assert torch.allclose(out[head], weights @ v[head, mine], atol=1e-5)
        assert cache.attended()[head].nonzero()[:, 0].tolist() == sorted(mine)
    assert cache.attended().shape == (HK, at + 1)


def bytes_held(cache):
    return storage_bytes(x for x in vars(cache).values() if isinstance(x, torch.Tensor))


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("kept", [[[0], [19]], [[0, 1, 2, 7], [3, 9, 18, 19]], [list(range(20))] * 2], ids=len)
def test_a_pruned_prompt_and_all_that_follows(kept, offload):
    k, v = tokens(33)
    cache = PrunedCache(HK, D, CAPACITY, CAPACITY, TIERS, offload)
    written = cache.load_subset(k[:, :20].clone(), v[:, :20].clone(), torch.tensor(kept))
    for at in range(20, 33):
        written += cache.append(k[:, at], v[:, at])
        check(cache, k, v, [[*mine, *range(20, at + 1)] for mine in kept], at)
    assert (cache.length, cache.held) == (33, len(kept[0]) + 13)
    assert written == (cache.held * HK * KV if offload else 0)
    rows = HK * (CAPACITY - 20 + len(kept[0]))
    assert cache.footprint() == (
        Footprint(rows * POSITION, rows * KV) if offload else Footprint(rows * (KV + POSITION))
    )
    assert bytes_held(cache) == rows * (KV + POSITION)


def test_what_was_kept_may_be_cut_again_and_again():
    k, v = tokens(25)
    cache = PrunedCache(HK, D, 12, CAPACITY, TIERS)
    cache.load(k[:, :20].clone(), v[:, :20].clone())
    held = [list(range(20))] * HK
    for rows in ([[0, 3, 5, 18, 19], [1, 2, 3, 4, 19]], [[0, 1, 2, 3, 4]] * 2, [[1, 4], [0, 4]]):
        cache.prune(torch.tensor(rows))
        held = [[mine[row] for row in some] for mine, some in zip(held, rows, strict=True)]
        check(cache, k[:, :20], v[:, :20], held, 19)
        assert bytes_held(cache) == HK * (CAPACITY - 20 + len(rows[0])) * (KV + POSITION)
    for at in range(20, 25):
        cache.append(k[:, at], v[:, at])
        check(cache, k, v, [[*mine, *range(20, at + 1)] for mine in held], at)


def test_nothing_is_allocated_before_the_prompt_but_the_plan_is_told():
    cache = PrunedCache(HK, D, 50, CAPACITY, TIERS)
    assert cache.footprint() == PrunedCache(HK, D, 50, CAPACITY, META).footprint()
    assert cache.footprint() == Footprint(50 * HK * (KV + POSITION))
    assert all(x.is_meta for x in vars(cache).values() if isinstance(x, torch.Tensor))
    assert cache.traffic(CAPACITY).attended == 50 * HK * KV
    assert cache.traffic(30).attended == 20 * HK * KV
    k, v = tokens(30)
    cache.load_subset(k, v, torch.arange(20).expand(HK, -1))
    assert cache.footprint() == Footprint(50 * HK * (KV + POSITION)), "the plan, where it holds"


@pytest.mark.parametrize("recent", [0, 1, 4, 9])
@pytest.mark.parametrize("prompt", [1, 8, 9, 10, 30])
def test_the_lowest_score_makes_room_and_of_equals_the_newest(prompt, recent):
    k, v = tokens(prompt + 25)
    scores = torch.randn(HK, prompt + 25, generator=torch.Generator().manual_seed(prompt)).mul(2).round()
    cache = EvictingCache(HK, D, 9, recent, TIERS)
    for tensor in (cache.k, cache.v, cache.scores):
        tensor.fill_(float("nan"))  # nothing may be read that was not written
    cache.load_scored(k[:, :prompt].clone(), v[:, :prompt].clone(), scores[:, :prompt])
    held = []
    for head in range(HK):
        old = sorted(range(max(0, prompt - recent)), key=lambda token: (-scores[head, token].item(), token))
        held.append([*old[: 9 - min(recent, prompt)], *range(max(0, prompt - recent), prompt)])
    for at in range(prompt, prompt + 25):
        cache.append(k[:, at], v[:, at])
        for head, mine in enumerate(held):
            if len(mine) == 9:
                old = [token for token in mine if token <= at - recent]
                mine.remove(min(old, key=lambda token: (scores[head, token].item(), -token)))
            mine.append(at)
        check(cache, k, v, held, at)
        assert (cache.scores[:, : cache.held][cache.positions[:, : cache.held] == at] == 0).all()
        for head in range(HK):  # the method scores the newest token
            row = cache.positions[head, : cache.held].tolist().index(at)
            cache.scores[head, row] = scores[head, at]
    assert (cache.length, cache.held) == (prompt + 25, 9)
    assert cache.footprint() == EvictingCache(HK, D, 9, recent, META).footprint()
    assert cache.footprint().device == bytes_held(cache)


def test_a_prompt_without_scores_is_cut_to_its_beginning_and_its_end():
    k, v = tokens(30)
    cache = EvictingCache(HK, D, 9, 4, TIERS)
    cache.load(k, v)
    check(cache, k, v, [[*range(5), *range(26, 30)]] * HK, 29)
