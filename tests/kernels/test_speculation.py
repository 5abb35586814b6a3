"""Speculation in one loop against the operations that it carries out, in float64 where they add numbers."""

import math

import numpy as np
import pytest
import torch

from kvcli.kernels import _numba, chain
from kvcli.kernels._llvm import at_address
from kvcli.kernels.chain import Called, Chain, Normalised, called_loop, floats
from kvcli.kernels.page_scores import page_scores_ref
from kvcli.kernels.page_table import EMPTY, resolve_pages
from kvcli.kernels.query_similarity import query_similarity
from kvcli.kernels.speculation import TOLD, Pages, SpeculationInChain, SpeculationSettings, speculate, suits
from kvcli.kernels.topk import topk_pages_ref

pytestmark = pytest.mark.skipif(_numba.numba is None, reason="numba is not there")
FIRST = 3  # the number of the first candidate


@pytest.fixture(autouse=True)
def nothing_is_too_small(monkeypatch):
    monkeypatch.setattr(_numba, "LEAST", 1)


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def among_poison(bounds):
    """The same bounds of fewer pages and heads than there is memory for, as a cache holds them."""
    heads, n, *rest = bounds.shape
    around = torch.full((heads + 2, n + 5, *rest), math.nan)
    return around[1:-1, 2 : 2 + n].copy_(bounds)


# The loop is compiled for d and a head's rows of scores, which takes seconds: of 16 channels and two rows it is for the
# tests of methods, too. Pooled queries are one row.
SHAPES = [(2, 3, 13, 7, 4), (1, 2, 16, 1029, 40), (3, 1, 16, 9, 9)]
POOLINGS = ["mean_s", "max_s", "mean_qk", "max_qk", "mean_q", "max_q"]
CASES = [
    pytest.param(pooling, *shape, marks=[pytest.mark.exhaustive] if shape[2] == 13 and pooling.endswith("_q") else [])
    for shape in SHAPES
    for pooling in POOLINGS
]


@pytest.mark.parametrize(("pooling", "heads", "group", "d", "n", "k"), CASES)
@pytest.mark.parametrize("similarity", ["mean", "max"])
def test_a_step_is_that_of_its_phases(pooling, similarity, heads, group, d, n, k):
    resident, before = torch.full((heads, k), EMPTY), None
    for step in range(6):
        q = noise(heads * group, d, seed=step) / 2 + noise(heads * group, d, seed=99)  # some heads turn, some do not
        bounds = noise(heads, n, 2, d, seed=7).sort(2, descending=True).values
        expected = topk_pages_ref(page_scores_ref(q.double(), bounds.double(), 0.4, pooling), k).sort(-1).values + FIRST
        turned = torch.ones(heads, dtype=torch.bool)
        if before is not None:
            turned = query_similarity(q.double(), before.double(), heads, similarity) < 0.7
        wanted, after = resolve_pages(resident, expected), resident.clone()
        after[wanted.heads, wanted.slots] = wanted.pages

        how = SpeculationSettings(0.7, similarity, 0.4, pooling)
        found = speculate(q, Pages(how, before, among_poison(bounds), FIRST, FIRST + n, resident))
        assert torch.equal(found.selected, expected)
        assert torch.equal(found.corrected, turned)
        assert torch.equal(resident, after)
        assert found.missing.tolist() == wanted.by_head(heads)
        assert torch.equal(found.query, q)
        for of in (True, False):
            own = turned[wanted.heads] == of
            assert all(torch.equal(one, other[own]) for one, other in zip(found.misses(of), wanted, strict=True))
        before = q


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("pooling", "heads", "group", "d", "n", "k"), [("mean_s", 3, 2, 16, 40, 6), ("max_q", 1, 3, 16, 9, 9)]
)
def test_in_a_chain_it_brings_what_is_missing_too(pooling, heads, group, d, n, k, threads, monkeypatch):
    """The choice is that of `speculate`; pages of corrected heads come before attention, the others after it."""
    monkeypatch.setattr(chain, "use_threads", lambda _: threads)
    width, size, sink = heads * group * d, 4, 1
    spoken = SpeculationInChain(heads * group, heads, d, pooling)
    seen = Called("x", called_loop(_looking(k * size * d)), 1, 0)
    stages = [
        Normalised("x", "kept", torch.ones(width), 1e-6, 0.0),
        *spoken.before("x", 0),
        seen,
        *spoken.after("x", 0),
    ]
    run, how = Chain(["x"], stages, ["kept"]), SpeculationSettings(0.7, "mean", 0.4, pooling)
    blocks, kv = noise(FIRST + n, heads, 2, size, d, seed=5), torch.full((2, heads, sink + k + 2, size, d), math.nan)
    slots, resident, alone = kv[:, :, sink : sink + k], *torch.full((2, heads, k), EMPTY)
    before = None
    for step in range(5):
        q = noise(heads * group, d, seed=step) / 2 + noise(heads * group, d, seed=99)
        bounds = among_poison(noise(heads, n, 2, d, seed=step).sort(2, descending=True).values)
        wanted = speculate(q, Pages(how, before, bounds, FIRST, FIRST + n, alone))
        pages = Pages(how, before, bounds, FIRST, FIRST + n, resident, slots, blocks)
        room, told = torch.full((spoken.room(pages) + 1,), math.nan), np.zeros((2, TOLD), np.int64)
        between, held = torch.empty(heads, k, size, d), slots[0].clone()
        found = spoken.tell(told[0], pages, room.data_ptr())
        told[1, :4] = heads, slots.data_ptr(), between.data_ptr(), slots.stride(1)
        run(q.view(1, -1), told=told)
        for name in ("corrected", "selected", "missing"):
            assert torch.equal(getattr(found, name), getattr(wanted, name))
        assert torch.equal(resident, alone)
        its = blocks[resident, torch.arange(heads)[:, None]]  # [Hk, k, 2, p, d]
        assert torch.equal(slots[0], its[:, :, 0])
        assert torch.equal(slots[1], its[:, :, 1])
        assert kv[:, :, :sink].isnan().all()
        assert kv[:, :, sink + k :].isnan().all()
        assert room[-1].isnan()
        assert torch.equal(found.query, q)
        before = found.query
        if step:
            early = torch.where(found.corrected[:, None, None, None], slots[0], held)
            assert torch.equal(between, early)


def _looking(numbers):
    """A loop that notes what the keys in the slots of a head are between the stages."""

    def look(place, _, __, h):
        told = at_address(place, np.int64(0), 4)
        source, target = floats(told[1] + 4 * h * told[3], numbers), floats(told[2] + 4 * h * numbers, numbers)
        for i in range(numbers):
            target[i] = source[i]

    return look


def test_a_zero_query_has_no_direction():
    q, bounds, resident = torch.zeros(2, 16), noise(2, 5, 2, 16), torch.full((2, 2), EMPTY)
    for below, turned in ((0.1, True), (-0.1, False)):
        how = SpeculationSettings(below, "mean", 1.0, "mean_s")
        found = speculate(q, Pages(how, noise(2, 16), bounds, 0, 5, resident))
        assert found.corrected.tolist() == [turned] * 2
        assert found.selected.tolist() == [[0, 1]] * 2  # of equals the lower pages


def test_other_dtypes_and_gaps_are_left_to_the_phases():
    q, bounds, resident = noise(4, 8), noise(2, 5, 2, 8), torch.full((2, 2), EMPTY)
    assert suits(q, bounds, resident, 0)
    assert not suits(q.bfloat16(), bounds, resident, 0)
    assert not suits(q, bounds.bfloat16(), resident, 0)
    assert not suits(q, bounds, resident.T.contiguous().T, 0)
    assert not suits(noise(18, 8), bounds, resident, 0)  # nine queries for a KV head
