"""Surprise, thresholds and splits against definitions written out in plain loops."""

import math
import statistics

import pytest
import torch

from kvcli.methods.em_llm import refined, split_scores, surprise, surprising


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_surprise_is_the_negative_log_likelihood_also_of_many_rows():
    logits, ids = 3 * noise(70, 11), [at % 11 for at in range(70)]
    probabilities = logits.double().softmax(-1)
    expected = [-math.log(probabilities[row, token]) for row, token in enumerate(ids)]
    assert surprise(logits, ids).tolist() == pytest.approx(expected, rel=1e-5)
    assert len(surprise(logits[:0], [])) == 0


@pytest.mark.parametrize(("new", "over", "gamma"), [(40, 100, 1.0), (25, 7, 0.5), (40, 3, 0.0)])
def test_a_token_surprises_by_what_came_just_before_it(new, over, gamma):
    values = noise(40, seed=3).double().abs()
    found = surprising(values, new, over, gamma).tolist()
    for place, at in enumerate(range(40 - new, 40)):
        before = values[max(0, at - over) : at].tolist()
        if len(before) < 2:
            assert not found[place]
        else:
            assert found[place] == (values[at] > statistics.mean(before) + gamma * statistics.stdev(before))
    assert 0 < sum(found) < new


def split_score(graph, t, metric):
    """The formulas of the paper, pair by pair."""
    n = len(graph)
    side = [i < t for i in range(n)]
    pairs = [(i, j) for i in range(n) for j in range(n)]
    if metric == "modularity":
        twice_m = sum(graph[i][j] for i, j in pairs)
        degree = [sum(row) for row in graph]
        same = [(i, j) for i, j in pairs if side[i] == side[j]]
        return sum(graph[i][j] - degree[i] * degree[j] / twice_m for i, j in same) / (2 * twice_m)
    cut = sum(graph[i][j] for i, j in pairs if side[i] and not side[j])
    volumes = [sum(graph[i][j] for i, j in pairs if side[i] == side[j] == where) for where in (True, False)]
    return -cut / min(volumes)


@pytest.mark.parametrize("metric", ["modularity", "conductance"])
def test_splits_are_scored_as_the_paper_writes(metric):
    points = noise(12, 5, seed=4).double().abs()
    graph = points @ points.T
    expected = [split_score(graph.tolist(), t, metric) for t in range(1, 12)]
    assert split_scores(graph, metric).tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("metric", ["modularity", "conductance"])
def test_a_boundary_moves_back_to_where_the_graph_falls_apart(metric):
    """Two groups of tokens, alike within, that part at token 108; surprise came at 114."""
    graph = torch.full((30, 30), 0.1, dtype=torch.float64)
    graph[:18, :18] = graph[18:, 18:] = 1.0
    assert refined(graph, metric, 90, 3, 100, 114) == 108
    assert refined(graph, metric, 90, 10, 100, 114) == 110, "an event keeps its least length"
    assert 103 <= refined(graph, metric, 90, 3, 100, 106) <= 106, "it never moves on"
    assert refined(graph, metric, 90, 1, 100, 101) == 101
