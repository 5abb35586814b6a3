"""The oracle and chance, the ceiling and the floor of a selection, against slow loops in float64."""

import math

import pytest
import torch
from driver import HK, D, H, Stream
from oracle import G, best, dot, same, softmax

BUDGET = 30


def step_of_its_own(stream, step, sink, window):
    """Each query head attends to the tokens that it scores best -> [H, d]."""
    length, out = stream.prompt + step + 1, []
    for head in range(H):
        keys, values = (kv[head // G].double().tolist() for kv in (stream.k, stream.v))
        query = stream.q[step][head].double().tolist()
        scores = [dot(query, key) / math.sqrt(D) for key in keys[:length]]
        tokens = list(range(length))
        if length > BUDGET:
            middle = range(sink, length - window)
            chosen = [middle[i] for i in best([scores[token] for token in middle], BUDGET - sink - window)]
            tokens = [*range(sink), *chosen, *range(length - window, length)]
        weights = softmax([scores[token] for token in tokens])
        out.append([dot(weights, channel) for channel in zip(*(values[token] for token in tokens), strict=True)])
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("prompt", [61, 22])  # retrieving from the first step; growing out of the budget
@pytest.mark.parametrize("settings", [{}, {"sink": 3, "window": 6}], ids=str)
def test_every_query_head_reads_what_it_weighs_most(prompt, settings):
    stream = Stream(prompt, steps=30, seed=prompt)
    for step, _, out in stream.run("oracle", {"budget": BUDGET, **settings}):
        assert same(out, step_of_its_own(stream, step, settings.get("sink", 0), settings.get("window", 1))), step


def test_no_selection_holds_more_of_the_attention():
    stream = Stream(90, steps=12, seed=4)
    masses = {}
    for name, settings in (("oracle", {}), ("random", {"sink": 0, "window": 0}), ("streaming", {})):
        settings = {"budget": BUDGET, **settings}
        masses[name] = [
            float((out - full).norm() / full.norm())
            for (_, _, out), (_, _, full) in zip(stream.run(name, settings), stream.run("full", {}), strict=True)
        ]
    assert sum(masses["oracle"]) < min(sum(masses["random"]), sum(masses["streaming"]))


def test_chance_draws_anew_in_every_step_and_head_and_the_same_in_every_run():
    stream = Stream(80, steps=8, seed=1)
    settings = {"budget": BUDGET, "sink": 2, "window": 5}
    runs = [
        [method.attended(next(iter(method.retrieval))).clone() for _, method, _ in stream.run("random", wanted)]
        for wanted in (settings, settings, {**settings, "seed": 1})
    ]
    assert all(torch.equal(one, other) for one, other in zip(*runs[:2], strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(runs[0], runs[2], strict=True))
    for mask in runs[0]:
        assert mask.sum(1).tolist() == [BUDGET] * HK
        assert mask[:, :2].all()
        assert mask[:, -5:].all()
    assert not torch.equal(runs[0][0][0], runs[0][0][1])
    assert not torch.equal(runs[0][0][:, 2:75], runs[0][1][:, 2:75])
