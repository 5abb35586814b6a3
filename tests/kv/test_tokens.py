"""Caches whose tokens are selected one by one, against lists of tokens."""

import pytest
import torch

from kvcli.kernels import _numba, page_table
from kvcli.kernels.softmax import Softmax
from kvcli.kv.cache import Tiers
from kvcli.kv.tokens import OffloadedTokenCache, ResidentTokenCache, TokenBudget, resolve_tokens
from kvcli.methods.fier.method import OneBitIndex

HK, D, CAPACITY = 2, 8, 60
TIERS = Tiers.for_device(torch.device("cpu"), torch.float32)
META = Tiers.for_device(torch.device("meta"), torch.float32)
BUDGETS = [TokenBudget(24, 2, 1, 8), TokenBudget(24, 0, 5, 4), TokenBudget(24, 3, 9, 5), TokenBudget(24, 0, 1, 1)]
SOFTMAX = Softmax(D**-0.5)


def tokens(count):
    return torch.randn(2, HK, count, D, generator=torch.Generator().manual_seed(count)).unbind()


def dense(q, k, v):
    scores = torch.einsum("hgd,hnd->hgn", q.view(HK, -1, D), k) * SOFTMAX.scale
    return torch.einsum("hgn,hnd->hgd", scores.softmax(-1), v).reshape(q.shape)


def new_cache(kind, budget, tiers=TIERS):
    index = OneBitIndex(HK, D, budget.group, CAPACITY // budget.group, tiers)
    return kind(HK, D, CAPACITY, budget, index, tiers)


def poisoned(cache):
    for tensor in vars(cache).values():
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            tensor.fill_(float("nan"))  # nothing may be read that was not written
    return cache


@pytest.mark.parametrize("kind", [ResidentTokenCache, OffloadedTokenCache])
@pytest.mark.parametrize("budget", BUDGETS, ids=str)
@pytest.mark.parametrize("prompt", [1, 3, 8, 23, 24, 25, 47])
def test_attends_to_sinks_selection_and_recent_tokens(kind, budget, prompt):
    k, v = tokens(prompt + 12)
    cache = poisoned(new_cache(kind, budget))
    cache.load(k[:, :prompt].clone(), v[:, :prompt].clone())
    generator = torch.Generator().manual_seed(prompt)
    for at in range(prompt, prompt + 12):
        cache.append(k[:, at], v[:, at])
        q = torch.randn(2 * HK, D, generator=generator)
        if not cache.active:
            out, expected = cache.attend(q, SOFTMAX), dense(q, k[:, : at + 1], v[:, : at + 1])
        else:
            candidates = cache.candidates
            chosen = [torch.randperm(len(candidates), generator=generator)[: cache.selected] for _ in range(HK)]
            selected = torch.stack(chosen) + candidates.start
            cache.recall(selected)
            out = cache.attend_selected(q, selected, SOFTMAX)
            recent = range(candidates.stop, at + 1)
            held = [[*range(budget.sink), *row, *recent] for row in selected.tolist()]
            assert {len(row) for row in held} == {budget.total}
            heads = torch.arange(HK)[:, None]
            expected = dense(q, k[heads, held], v[heads, held])
        assert torch.allclose(out, expected, atol=1e-5), f"token {at}"


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
@pytest.mark.parametrize("length", range(25, 60))
def test_budget_is_spent_to_the_token(budget, length):
    candidates = budget.candidates(length)
    recent = length - candidates.stop
    assert candidates.start == budget.sink
    assert recent == max(budget.window, length % budget.group)
    assert candidates.stop <= budget.full(length), "what can be selected is quantised"
    selected = budget.total - budget.sink - recent
    assert budget.min_selected <= selected <= budget.max_selected
    assert 1 <= selected <= len(candidates)


def test_hits_stay_and_only_misses_move():
    k, v = tokens(40)
    cache = new_cache(OffloadedTokenCache, TokenBudget(6, 0, 1, 4))
    cache.load(k, v)
    assert cache.recall(torch.tensor([[0, 9, 30], [4, 5, 6]])) == ([3, 3], 6 * 2 * D * 4)
    assert cache.recall(torch.tensor([[9, 30, 1], [6, 5, 4]])) == ([1, 0], 2 * D * 4)
    assert cache.recall(torch.tensor([[9, 1], [2, 3]])) == ([0, 2], 2 * 2 * D * 4)
    assert [sorted(set(row) - {-1}) for row in cache.resident.tolist()] == [[1, 9], [2, 3]]


@pytest.mark.parametrize("kind", [ResidentTokenCache, OffloadedTokenCache])
def test_footprint_counts_what_is_allocated_even_on_meta(kind):
    real, planned = (new_cache(kind, BUDGETS[0], tiers).footprint() for tiers in (TIERS, META))
    assert real == planned
    index = HK * (CAPACITY // 8) * (8 * 1 + 2 * D * 4)
    token = HK * 2 * D * 4
    if kind is ResidentTokenCache:
        assert (real.device, real.host) == (CAPACITY * token + index, 0)
    else:
        slots = 24 - 2 - 1
        assert real.device == (2 + slots + 8) * token + HK * slots * 8 + index
        assert real.host == CAPACITY * token


@pytest.mark.parametrize("by_loops", [False, True])
@pytest.mark.parametrize("wanted", [1, 4, 6])
def test_resolution_fetches_what_is_missing_into_slots_that_are_free(wanted, by_loops, monkeypatch):
    monkeypatch.setattr(_numba, "LEAST", 0 if by_loops else 1 << 15)
    generator = torch.Generator().manual_seed(wanted)
    for _ in range(50):
        resident = torch.stack([torch.randperm(13, generator=generator)[:6] for _ in range(HK)])
        selected = torch.stack([torch.randperm(13, generator=generator)[:wanted] for _ in range(HK)])
        resident[0, :2] = -1
        assert page_table.suits(resident, selected, 13) == by_loops
        after = resident.clone()
        misses = resolve_tokens(after, selected, 13)
        assert torch.equal(after[misses.heads, misses.slots], misses.pages)
        for head in range(HK):
            held, chosen = set(resident[head].tolist()), set(selected[head].tolist())
            assert set(after[head].tolist()) - {-1} == chosen
            assert (after[head] != -1).sum() == wanted, "none is held twice"
            stays = torch.tensor([token in chosen for token in resident[head].tolist()])
            assert torch.equal(after[head][stays], resident[head][stays]), "hits do not move"
            free, mine = (~stays).nonzero()[:, 0], misses.heads == head
            assert misses.pages[mine].tolist() == [token for token in selected[head].tolist() if token not in held]
            assert torch.equal(misses.slots[mine], free[: int(mine.sum())])


def test_resolution_of_a_hit_moves_nothing():
    resident = torch.tensor([[3, 5, -1]])
    assert all(len(part) == 0 for part in resolve_tokens(resident, torch.tensor([[5, 3]]), 6))
    assert resident.tolist() == [[3, 5, -1]]
