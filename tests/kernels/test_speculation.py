"""Speculation in one loop against the operations that it carries out, in float64 where they add numbers."""

import math

import pytest
import torch

from kvcli.kernels import _numba, speculation
from kvcli.kernels.page_scores import page_scores_ref
from kvcli.kernels.page_table import EMPTY, resolve_pages
from kvcli.kernels.query_similarity import query_similarity
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

        how = q, before, 0.7, similarity, among_poison(bounds), 0.4, pooling
        found = speculation.speculate(*how, resident, FIRST, FIRST + n)
        assert torch.equal(found.selected, expected)
        assert torch.equal(found.corrected, turned)
        assert torch.equal(resident, after)
        assert found.missing == wanted.by_head(heads)
        for misses, of in ((found.now, turned), (found.later, ~turned)):
            own = of[wanted.heads]
            assert all(torch.equal(one, other[own]) for one, other in zip(misses, wanted, strict=True))
        before = q


def test_a_zero_query_has_no_direction():
    q, bounds, resident = torch.zeros(2, 16), noise(2, 5, 2, 16), torch.full((2, 2), EMPTY)
    for below, turned in ((0.1, True), (-0.1, False)):
        found = speculation.speculate(q, noise(2, 16), below, "mean", bounds, 1.0, "mean_s", resident, 0, 5)
        assert found.corrected.tolist() == [turned] * 2
        assert found.selected.tolist() == [[0, 1]] * 2  # of equals the lower pages


def test_other_dtypes_and_gaps_are_left_to_the_phases():
    q, bounds, resident = noise(4, 8), noise(2, 5, 2, 8), torch.full((2, 2), EMPTY)
    assert speculation.suits(q, bounds, resident, 0)
    assert not speculation.suits(q.bfloat16(), bounds, resident, 0)
    assert not speculation.suits(q, bounds.bfloat16(), resident, 0)
    assert not speculation.suits(q, bounds, resident.T.contiguous().T, 0)
    assert not speculation.suits(noise(18, 8), bounds, resident, 0)  # nine queries for a KV head
