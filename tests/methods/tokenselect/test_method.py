"""TokenSelect against a slow re-derivation in float64, sharing no code with it."""

import math
from copy import copy

import pytest
import torch
from driver import HK, SOFTMAX, D, Stream
from engine import run
from families import VOCAB, tiny_model
from oracle import attention, best, dot, group, same, softmax

from kvcli.conformance.test_host_kv import BITS, counted_again
from kvcli.errors import KvcliError
from kvcli.kernels import _numba
from kvcli.kernels.quant import channel_sizes

BUDGET, SINK, WINDOW = 30, 3, 6
SETTINGS = {"budget": BUDGET, "sink": SINK, "window": WINDOW}
STEPS = 60


class Oracle:
    """One layer, step after step: the tokens that all heads chose together, and when.

    `held` are the stream's tokens as they are scored and, once chosen, attended to.
    """

    def __init__(self, stream, theta, held=None):
        self.stream, self.theta, self.held = stream, theta, held or stream
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
            keys = self.held.k[head, list(candidates)].double().tolist()
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
        kv, chosen = copy(self.stream), self.chosen
        kv.k, kv.v = self.stream.k.clone(), self.stream.v.clone()
        kv.k[:, chosen], kv.v[:, chosen] = self.held.k[:, chosen], self.held.v[:, chosen]
        return attention(kv, q, [[*range(SINK), *chosen, *range(length - WINDOW, length)]] * HK)


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


@pytest.mark.parametrize("least", [1, 1 << 40])  # by loops, and without them
@pytest.mark.parametrize(("prompt", "held"), [(61, "int8"), (61, "k8v4"), (22, "int8"), (22, "k8v4")])
def test_quantised_tokens_are_chosen_and_attended_to_as_they_are_held(prompt, held, least, monkeypatch):
    """What every step attends to in addition, sinks and window, is as computed; so is everything within the budget."""
    monkeypatch.setattr(_numba, "LEAST", least)
    stream = Stream(prompt, steps=STEPS, seed=prompt)
    stream.k[:, :, 3] *= 40  # a channel that would drown the others if they shared its scale
    rounded, sizes = copy(stream), channel_sizes(stream.k[:, :prompt])[:, None]
    of_keys, of_values = ((bits, 1, D * bits // 8) for bits in BITS[held])
    rounded.k = sizes * counted_again(stream.k / sizes, *of_keys)
    rounded.v = counted_again(stream.v, *of_values)
    oracle = Oracle(stream, 0.8, rounded)
    for step, method, out in stream.run("tokenselect", {**SETTINGS, "theta": 0.8, "kv_dtype": held}):  # noqa: B007
        assert same(out, oracle.step(step)), f"step {step}"
    assert method.statistics() == {"layer_steps": oracle.steps, "choices": oracle.choices}
    assert 1 < oracle.choices < oracle.steps
    assert not same(out, Oracle(stream, 0.8).step(step))


def test_a_fork_of_quantised_tokens_scores_those_of_both():
    """The fork's tokens lie in memory of its own, after those that it shares."""
    settings = {**SETTINGS, "theta": 1.0, "kv_dtype": "int8"}
    stream = Stream(61, steps=STEPS, seed=3)
    expected = [out for _, _, out in stream.run("tokenselect", settings)]
    for step, method, _ in stream.run("tokenselect", settings):  # noqa: B007
        if step == 20:
            break
    fork = method.fork(method.context.counters, "fork")
    assert len(fork.retrieval[1].pool.pieces) == 2
    for step in range(21, STEPS):
        at = stream.prompt + step
        out = fork.attend(1, stream.q[step], stream.k[:, at], stream.v[:, at], SOFTMAX)
        assert torch.equal(out, expected[step]), f"step {step}"


def test_latents_stay_as_computed():
    with pytest.raises(KvcliError, match="kv_dtype int8: this model's tokens have one latent"):
        run(tiny_model("deepseek_v3"), "tokenselect", {**SETTINGS, "kv_dtype": "int8"}, [[5]], 1)


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
