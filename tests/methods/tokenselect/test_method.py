"""TokenSelect against a slow re-derivation in float64, sharing no code with it."""

import math

import pytest
import torch
from driver import HK, D, Stream
from engine import run
from families import VOCAB, tiny_model
from oracle import attention, best, dot, group, same, softmax

BUDGET, SINK, WINDOW = 30, 3, 6
SETTINGS = {"budget": BUDGET, "sink": SINK, "window": WINDOW}
STEPS = 60


class Oracle:
    """One layer, step after step: the tokens that all heads chose together, and when."""

    def __init__(self, stream, theta):
        self.stream, self.theta = stream, theta
        self.chosen, self.by = None, None
        self.steps = self.choices = 0

    def turned(self, q):
        if self.by is None or self.theta in (0, 1):
            return self.by is None or self.theta == 1
        a, b = q.flatten().double().tolist(), self.by.flatten().double().tolist()
        return dot(a, b) / math.sqrt(dot(a, a) * dot(b, b)) < self.theta

    def vote(self, q, candidates):
        votes = [0.0] * len(candidates)
        for head in range(HK):
            keys = self.stream.k[head, list(candidates)].double().tolist()
            for query in group(q, head):
                weights = softmax([dot(query, key) / math.sqrt(D) for key in keys])
                votes = [a + b for a, b in zip(votes, weights, strict=True)]
        return [candidates[i] for i in best(votes, BUDGET - SINK - WINDOW)]

    def step(self, step):
        length, q = self.stream.prompt + step + 1, self.stream.q[step]
        if length <= BUDGET:
            return attention(self.stream, q, [range(length)] * HK)
        self.steps += 1
        if self.turned(q):
            self.choices += 1
            self.chosen, self.by = self.vote(q, range(SINK, length - WINDOW)), q
        return attention(self.stream, q, [[*range(SINK), *self.chosen, *range(length - WINDOW, length)]] * HK)


@pytest.mark.parametrize("prompt", [61, 22])  # retrieving from the first step; growing out of the budget
@pytest.mark.parametrize("theta", [0.0, 0.8, 1.0])
def test_every_step_matches_the_oracle(prompt, theta):
    stream = Stream(prompt, steps=STEPS, seed=prompt)
    oracle = Oracle(stream, theta)
    for step, method, out in stream.run("tokenselect", {**SETTINGS, "theta": theta}):  # noqa: B007 - read afterwards
        assert same(out, oracle.step(step)), f"step {step}"
    assert method.statistics() == {"layer_steps": oracle.steps, "choices": oracle.choices}
    assert oracle.steps == sum(prompt + step + 1 > BUDGET for step in range(STEPS))
    assert oracle.choices == {0.0: 1, 1.0: oracle.steps}.get(theta, oracle.choices)
    if theta == 0.8:
        assert 1 < oracle.choices < oracle.steps
    cache = method.context.counters.cache()
    assert cache.pages_requested == cache.hits == oracle.steps * HK * (BUDGET - SINK - WINDOW)
    assert cache.misses == cache.bytes_to_device == cache.bytes_to_host == 0


def test_nothing_is_said_of_a_sequence_that_never_retrieved():
    *_, (_, method, _) = Stream(5, steps=3).run("tokenselect", SETTINGS)
    assert method.statistics() == {}


def test_two_sequences_side_by_side_choose_each_for_itself():
    model = tiny_model("gemma3")
    ids = [torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (71, 40)]
    together = run(model, "tokenselect", SETTINGS, ids, 40)
    for sequence, prompt in zip(together, ids, strict=True):
        (alone,) = run(model, "tokenselect", SETTINGS, [prompt], 40)
        assert sequence.token_ids == alone.token_ids
        assert sequence.method.statistics() == alone.method.statistics()
