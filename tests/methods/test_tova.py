"""TOVA against a slow re-derivation from the paper, in float64 and plain loops, sharing no code with it."""

import pytest
import torch
from driver import HK, D, H, Stream, layers
from engine import new_method
from eviction_oracle import Oracle, best

STEPS = 60


def mean_row(rows):
    """Mean of the heads' rows, token by token."""
    return [sum(values) / H for values in zip(*rows, strict=True)]


def held_by_layer(oracle, budget):
    """The tokens that all KV heads hold at each step, by algorithm 1 of the paper."""
    prompt = oracle.stream.prompt
    worth = dict(enumerate(mean_row(oracle.prompt_row(head, prompt - 1) for head in range(H))))
    held = best(worth, budget)
    for step in range(oracle.stream.steps):
        if len(held) == budget:
            held.remove(min(held, key=lambda token: (worth[token], -token)))
        held.append(prompt + step)
        yield list(held)
        worth = dict(zip(held, mean_row(oracle.step_row(head, step, held) for head in range(H)), strict=True))


@pytest.mark.parametrize(("prompt", "budget"), [(75, 24), (74, 7), (9, 30), (1, 5), (40, 1)])
def test_every_step_matches_the_oracle(prompt, budget):
    stream = Stream(prompt, STEPS, seed=prompt)
    oracle, omitted = Oracle(stream), 0
    for (step, method, out), held in zip(
        stream.run("tova", {"budget": budget}), held_by_layer(oracle, budget), strict=True
    ):
        oracle.check(step, method, out, [held] * HK)
        assert len(held) == min(prompt + step + 1, budget)
        omitted += step > 0 and prompt + step - 1 not in held
    assert omitted, "the newest token may be the one to go"


def test_two_sequences_side_by_side():
    streams = [Stream(75, 40, seed=1), Stream(33, 40, seed=2)]
    oracles = [Oracle(stream) for stream in streams]
    runs = [stream.run("tova", {"budget": 20}) for stream in streams]
    expected = [held_by_layer(oracle, 20) for oracle in oracles]
    for together in zip(*runs, *expected, strict=True):
        for oracle, (step, method, out), held in zip(oracles, together[:2], together[2:], strict=True):
            oracle.check(step, method, out, [held] * HK)


def test_memory_is_that_of_the_budget_whatever_the_context():
    footprints = [new_method("tova", {"budget": 24}, layers(), capacity).footprint() for capacity in (100, 100_000)]
    assert footprints[0] == footprints[1]
    assert footprints[0].device == 2 * 24 * (2 * HK * D * 4 + HK * (8 + 4))  # KV, position and score


def test_what_the_last_query_of_the_prompt_ignores_is_gone_at_once():
    stream = Stream(75, 1, seed=3)
    direction = torch.nn.functional.normalize(torch.ones(D), dim=0)
    stream.k -= (stream.k @ direction)[..., None] * direction
    looked_at = torch.arange(5, 70, 7)
    stream.k[:, looked_at] += 9 * direction
    stream.prompt_q[:, -1] = 4 * direction
    ((_, method, _),) = stream.run("tova", {"budget": len(looked_at) + 1})
    assert method.attended(1).nonzero()[:, 1].view(HK, -1).tolist() == [[*looked_at.tolist(), 75]] * HK
