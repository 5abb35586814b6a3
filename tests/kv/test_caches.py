"""Caches against lists of tokens."""

import pytest
import torch

from kvcli.kernels.softmax import Softmax
from kvcli.kv.cache import DenseCache, LayerCache, Tiers
from kvcli.kv.paged import OffloadedPageCache, ResidentPageCache
from kvcli.kv.pages import PageBudget
from kvcli.kv.sliding import ChunkCache, SlidingCache

HK, D = 2, 8
TIERS = Tiers.for_device(torch.device("cpu"), torch.float32)
META = Tiers.for_device(torch.device("meta"), torch.float32)
BUDGET = PageBudget(size=4, sink=1, window=2, selected=3)
SOFTMAX = Softmax(D**-0.5)


def tokens(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, HK, count, D, generator=generator).unbind()


def dense(q, k, v):
    scores = torch.einsum("hgd,hnd->hgn", q.view(HK, -1, D), k) * SOFTMAX.scale
    return torch.einsum("hgn,hnd->hgd", scores.softmax(-1), v).reshape(q.shape)


def make(kind, tiers=TIERS):
    if kind == "dense":
        return DenseCache(HK, D, 60, tiers)
    if kind == "sliding":
        return SlidingCache(HK, D, 13, tiers, sink=3)
    if kind == "chunked":
        return ChunkCache(HK, D, 12, tiers)
    return (ResidentPageCache if kind == "indexed" else OffloadedPageCache)(HK, D, 60, BUDGET, tiers)


@pytest.mark.parametrize("kind", ["dense", "sliding", "chunked", "indexed", "offloaded"])
@pytest.mark.parametrize("prompt", [1, 3, 4, 14, 23, 24, 25, 47])
def test_attends_to_what_it_should_hold(kind, prompt):
    k, v = tokens(prompt + 11)
    cache = make(kind)
    for tensor in vars(cache).values():
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            tensor.fill_(float("nan"))  # nothing may be read that was not written
    written = cache.load(k[:, :prompt].clone(), v[:, :prompt].clone())
    for at in range(prompt, prompt + 11):
        written += cache.append(k[:, at], v[:, at])
        held = list(range(at + 1))
        if kind == "sliding" and at + 1 > 16:
            held = [*range(3), *range(at + 1 - 13, at + 1)]
        if kind == "chunked":
            held = list(range(at // 12 * 12, at + 1))
            assert cache.attended().tolist() == [[token in held for token in range(at + 1)]] * HK
        if kind == "offloaded" and cache.active:
            cache.recall(torch.tensor([[1, 2, 3]] * HK))
            recent = (BUDGET.count(at + 1) - BUDGET.window) * 4
            held = [*range(16), *range(recent, at + 1)]
        q = torch.randn(2 * HK, D, generator=torch.Generator().manual_seed(at))
        assert torch.allclose(cache.attend(q, SOFTMAX), dense(q, k[:, held], v[:, held]), atol=1e-5)
    assert written == ((prompt + 11) // 4 * HK * 2 * 4 * D * 4 if kind == "offloaded" else 0)


def test_host_pool_holds_every_full_page_in_one_piece():
    k, v = tokens(30)
    cache = make("offloaded")
    cache.load(k[:, :21].clone(), v[:, :21].clone())
    for at in range(21, 30):
        cache.append(k[:, at], v[:, at])
    for page in range(30 // 4):
        block = cache.pool.pieces[0][page]  # [Hk, 2, p, d]
        assert block.is_contiguous()
        assert torch.equal(block[:, 0], k[:, page * 4 : page * 4 + 4])
        assert torch.equal(block[:, 1], v[:, page * 4 : page * 4 + 4])


def test_recall_of_some_heads_leaves_the_others():
    k, v = tokens(45)
    cache = make("offloaded")
    cache.load(k, v)
    misses, moved = cache.recall(torch.tensor([[1, 2, 3], [4, 5, 6]]))
    assert (misses, moved) == ([3, 3], 6 * 2 * 4 * D * 4)
    misses, _ = cache.recall(torch.tensor([[1, 2, 7], [1, 2, 3]]), heads=torch.tensor([True, False]))
    assert misses == [1, 0]
    assert [sorted(row) for row in cache.resident.tolist()] == [[1, 2, 7], [4, 5, 6]]


@pytest.mark.parametrize("pages", [[[1, 4, 7], [2, 3, 8]]])
def test_indexed_attends_to_the_pages_of_each_head(pages):
    k, v = tokens(46)
    cache = make("indexed")
    cache.load(k, v)
    q = torch.randn(2 * HK, D, generator=torch.Generator().manual_seed(5))
    out = cache.attend_selected(q, torch.tensor(pages), SOFTMAX).view(HK, 2, D)
    for head, chosen in enumerate(pages):
        held = [*range(4), *(page * 4 + row for page in chosen for row in range(4)), *range(40, 46)]
        expected = dense(q, k[:, held], v[:, held]).view(HK, 2, D)[head]
        assert torch.allclose(out[head], expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["dense", "sliding", "indexed", "offloaded"])
def test_footprint_counts_what_is_allocated_even_on_meta(kind):
    real = make(kind).footprint()
    assert real == make(kind, META).footprint()
    assert real.device > 0
    assert (real.host > 0) == (kind == "offloaded")
    if kind == "offloaded":
        assert real.host == 15 * HK * 2 * 4 * D * 4


@pytest.mark.parametrize("length", range(1, 60))
def test_page_arithmetic(length):
    pages = BUDGET.count(length)
    assert (pages - 1) * 4 < length <= pages * 4
    assert BUDGET.active(length) == (length > 24)
    if BUDGET.active(length):
        assert len(BUDGET.candidates(length)) > BUDGET.selected - 1
        assert BUDGET.candidates(length).start == 1
        assert BUDGET.candidates(length).stop == pages - 2


def test_budget_rounds_sink_and_window_up_and_never_exceeds_itself():
    budget = PageBudget.of(budget=100, sink=4, window=17, page_size=16)
    assert (budget.sink, budget.window, budget.selected) == (1, 2, 3)
    assert budget.total * 16 <= 100


@pytest.mark.parametrize("name", ["append", "attend"])
def test_no_loop_writes_to_a_cache_that_does_more(name):
    """What a subclass does when it stores or attends must not be left out."""

    def more(self, *given):
        return getattr(OffloadedPageCache, name)(self, *given)

    changed = type("Changed", (OffloadedPageCache,), {name: more})
    assert changed.tokens_in_chain is LayerCache.tokens_in_chain
    assert changed.pages_in_chain is LayerCache.pages_in_chain
    unchanged = type("Unchanged", (OffloadedPageCache,), {})
    assert unchanged.pages_in_chain is OffloadedPageCache.pages_in_chain
