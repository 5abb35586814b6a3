"""PyramidKV: the budgets by the paper's formula in fractions, the tokens by those of SnapKV."""

from fractions import Fraction

import pytest
from driver import HK, SOFTMAX, Stream, layers
from engine import new_method
from eviction_oracle import Oracle, voted

STEPS = 60


def budgets(count, prompt, budget, window, beta):
    """From the double of the mean less the last layer's share down to this; what the prompt lacks goes there."""
    mean = Fraction(budget - window)
    last = mean // beta
    first = min(2 * mean - last, Fraction(prompt - window))
    last = 2 * mean - first
    return [window + int(first + (last - first) * layer / (count - 1)) for layer in range(count)]


@pytest.mark.parametrize("beta", [1, 3, 20])
@pytest.mark.parametrize(("prompt", "budget"), [(1000, 100), (1000, 61), (150, 100), (101, 100)])
@pytest.mark.parametrize("count", [2, 5, 32])
def test_budgets_fall_linearly_and_their_mean_is_the_budget(count, prompt, budget, beta):
    method = new_method("pyramidkv", {"budget": budget, "beta": beta, "window": 8}, layers(count), prompt + 9)
    found = [method.layer_budget(layer, prompt) for layer in range(count)]
    assert found == budgets(count, prompt, budget, 8, beta)
    assert found == sorted(found, reverse=True)
    assert budget - 1 < sum(found) / count <= budget
    assert found[0] <= prompt
    assert found[-1] >= 8 + (budget - 8) // beta


def test_sliding_layers_take_no_part():
    every, sliding = layers(7), layers(7, window=16)
    mixed = [every[index] if index % 3 == 0 else sliding[index] for index in range(7)]  # 0, 3 and 6 are cut
    method = new_method("pyramidkv", {"budget": 100, "window": 8}, mixed, 1000)
    found = [method.layer_budget(layer, 900) for layer in (0, 3, 6)]
    assert found == budgets(3, 900, 100, 8, 20)


def test_a_single_layer_keeps_the_budget():
    assert new_method("pyramidkv", {"budget": 100}, layers(1), 1000).layer_budget(0, 900) == 100


@pytest.mark.parametrize("prompt", [75, 40, 30, 7, 1])
def test_every_layer_and_step_matches_the_oracle(prompt):
    settings = {"budget": 30, "window": 5, "kernel": 3, "beta": 4}
    streams = [Stream(prompt, STEPS, seed=10 * prompt + layer) for layer in range(4)]
    method = new_method("pyramidkv", settings, layers(4), prompt + STEPS, prompt_tokens=prompt)
    planned = method.footprint()
    mine = budgets(4, prompt, 30, 5, 4) if prompt > 30 else [prompt] * 4
    oracles = [Oracle(stream) for stream in streams]
    kept = [
        [voted(oracle, head, budget, 5, 3) for head in range(HK)] for oracle, budget in zip(oracles, mine, strict=True)
    ]
    for layer, stream in enumerate(streams):
        k, v = (x[:, :prompt].clone() for x in (stream.k, stream.v))
        method.prefill(layer, k, v, stream.prompt_q[:, max(0, prompt - 5) :], SOFTMAX)
    assert method.footprint() == planned
    assert method.statistics() == {"kept_tokens": mine}
    for step in range(STEPS):
        for layer, stream in enumerate(streams):
            now = prompt + step
            out = method.attend(layer, stream.q[step], stream.k[:, now], stream.v[:, now], SOFTMAX)
            if step in (0, 1, 57, STEPS - 1):
                oracles[layer].check(
                    step, method, out, [[*stay, *range(prompt, now + 1)] for stay in kept[layer]], layer
                )
