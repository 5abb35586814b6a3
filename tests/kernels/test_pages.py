"""Kernels that summarise, score, select and resolve pages, against loops in float64."""

import itertools
import math

import pytest
import torch

from kvcli.kernels.page_scores import page_scores, page_summary
from kvcli.kernels.page_table import resolve_pages
from kvcli.kernels.query_similarity import query_similarity
from kvcli.kernels.topk import topk_pages, topk_pages_ref

HK, G, D, P = 2, 3, 8, 5
POOLINGS = [f"{how}_{what}" for how, what in itertools.product(("mean", "max"), ("s", "qk", "q"))]


def keys(pages):
    return torch.randn(HK, pages, P, D, generator=torch.Generator().manual_seed(pages))


def test_summary_holds_the_bounds_of_each_channel():
    found = page_summary(keys(7))
    for head, page, channel in itertools.product(range(HK), range(7), range(D)):
        values = keys(7)[head, page, :, channel].tolist()
        assert found[head, page, :, channel].tolist() == [max(values), min(values)]


@pytest.mark.parametrize("pooling", POOLINGS)
def test_scores_follow_the_formula(pooling):
    pages, scale = 11, D**-0.5
    k = keys(pages).double()
    q = torch.randn(HK * G, D, generator=torch.Generator().manual_seed(1))
    found = page_scores(q, page_summary(keys(pages)), scale, pooling)
    how, what = pooling.split("_")
    pool = (lambda values: sum(values) / len(values)) if how == "mean" else max
    for head in range(HK):
        group = q[head * G : head * G + G].double().tolist()
        if what == "q":
            group = [[pool([query[c] for query in group]) for c in range(D)]]
        rows = []
        for query in group:
            bounds = [
                scale
                * sum(max(query[c] * float(x), query[c] * float(y)) for c, (x, y) in enumerate(zip(*page, strict=True)))
                for page in zip(k[head].amin(1), k[head].amax(1), strict=True)
            ]
            total = sum(math.exp(bound) for bound in bounds)
            rows.append([math.exp(bound) / total for bound in bounds] if what == "s" else bounds)
        expected = [pool([row[page] for row in rows]) for page in range(pages)]
        assert found[head].tolist() == pytest.approx(expected, rel=1e-5)


def test_scores_bound_every_key_of_the_page():
    q = torch.randn(HK * G, D, generator=torch.Generator().manual_seed(2))
    bounds = page_scores(q[::G].repeat_interleave(G, 0), page_summary(keys(9)), 1.0, "max_qk")
    dots = torch.einsum("hd,hnpd->hnp", q[::G], keys(9)).amax(-1)
    assert (bounds >= dots - 1e-5).all()


@pytest.mark.parametrize("k", [1, 3, 10])
def test_topk_takes_the_best_and_of_equals_the_lower(k):
    scores = torch.randint(0, 4, (50, 10), generator=torch.Generator().manual_seed(k)).float()
    for row, found in zip(scores.tolist(), topk_pages(scores, k).tolist(), strict=True):
        best = sorted(range(10), key=lambda page: (-row[page], page))[:k]
        assert sorted(found) == sorted(best)


def test_topk_of_infinities_and_negatives():
    scores = torch.tensor([[float("-inf"), -3.0, float("-inf"), -7.0]])
    assert topk_pages(scores, 3).sort().values.tolist() == [[0, 1, 3]]


def test_topk_without_ties_and_of_everything():
    scores = torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 4.0]])
    assert topk_pages(scores, 2).sort().values.tolist() == [[0, 2], [1, 2]]
    assert topk_pages(scores, 3).tolist() == [[0, 1, 2]] * 2


def test_topk_by_parts_is_that_by_sorting():
    scores = torch.randn(3, 300, generator=torch.Generator().manual_seed(9))
    scores[1, :40] = float("-inf")
    assert torch.equal(topk_pages(scores, 20).sort().values, topk_pages_ref(scores, 20).sort().values)


@pytest.mark.parametrize("pooling", ["mean", "max"])
def test_similarity_is_the_pooled_cosine(pooling):
    a, b = torch.randn(2, HK * G, D, generator=torch.Generator().manual_seed(3)).unbind()
    found = query_similarity(a, b, HK, pooling)
    for head in range(HK):
        cosines = []
        for x, y in zip(a[head * G : head * G + G].tolist(), b[head * G : head * G + G].tolist(), strict=True):
            cosines.append(sum(i * j for i, j in zip(x, y, strict=True)) / math.hypot(*x) / math.hypot(*y))
        assert float(found[head]) == pytest.approx(sum(cosines) / G if pooling == "mean" else max(cosines), rel=1e-5)


def test_resolution_fetches_what_is_missing_into_slots_that_left():
    generator = torch.Generator().manual_seed(4)
    for _ in range(50):
        resident = torch.stack([torch.randperm(12, generator=generator)[:4] for _ in range(HK)])
        selected = torch.stack([torch.randperm(12, generator=generator)[:4] for _ in range(HK)])
        resident[0, 0] = -1
        misses = resolve_pages(resident, selected)
        after = resident.clone()
        after[misses.heads, misses.slots] = misses.pages
        for head in range(HK):
            held, wanted = set(resident[head].tolist()), set(selected[head].tolist())
            assert set(after[head].tolist()) == wanted
            kept = resident[head] == after[head]
            assert set(resident[head][kept].tolist()) == held & wanted
            assert int((misses.heads == head).sum()) == len(wanted - held)


def test_resolution_of_fewer_pages_than_there_are_slots():
    misses = resolve_pages(torch.tensor([[7, -1, 3, 9]]), torch.tensor([[9, 2]]))
    assert (misses.slots.tolist(), misses.pages.tolist()) == ([0, 1, 2], [2])


def test_resolution_of_a_hit_moves_nothing():
    pages = torch.tensor([[3, 5], [9, 2]])
    assert all(len(part) == 0 for part in resolve_pages(pages, pages.flip(1)))
