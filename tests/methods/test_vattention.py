"""vAttention against a slow re-derivation in float64 and plain loops, and its bound against full attention."""

import math
from statistics import NormalDist, fmean

import pytest
import torch
from driver import HK, SOFTMAX, D, H, Stream, layers
from engine import new_method
from oracle import G, dot, group, same, softmax
from two_bit_oracle import Codes

from kvcli.methods.vattention import drawn, proportional

BUDGET, SINK, WINDOW, SEED = 40, 3, 6, 4
SETTINGS = {"budget": BUDGET, "sink": SINK, "window": WINDOW, "seed": SEED}


def chances_of(weights, places):
    """min(1, c w), with c found by bisection, so that the sum is `places`."""
    low, high = 0.0, 1e12
    for _ in range(200):
        c = (low + high) / 2
        low, high = (c, high) if sum(min(1, c * w) for w in weights) < places else (low, c)
    return [min(1, low * w) for w in weights]


def walk(chances, start):
    """Tokens in whose chance, added up, a point lies; those that are certain anyway."""
    chosen, passed, point = [], 0.0, start
    for token, chance in enumerate(chances):
        if chance > 1 - 1e-6:
            chosen.append(token)
            continue
        passed += chance
        if point < passed:
            chosen.append(token)
            point += 1
    return chosen


def attend(stream, query, head, tokens, chances):
    """The output of a query head, and its variance as a part of its length squared."""
    k, v = (x[head].double() for x in (stream.k, stream.v))
    weights = softmax([dot(query, k[t].tolist()) / math.sqrt(D) - math.log(chances[t]) for t in tokens])
    out = [sum(a * float(v[t, c]) for a, t in zip(weights, tokens, strict=True)) for c in range(v.shape[1])]
    apart = [sum((float(v[t, c]) - out[c]) ** 2 for c in range(v.shape[1])) for t in tokens]
    variance = sum((1 - chances[t]) * a * a * x for a, t, x in zip(weights, tokens, apart, strict=True))
    return out, variance / dot(out, out)


@pytest.mark.parametrize("prompt", [61, 33])  # sampling from the first step; growing out of the budget
@pytest.mark.parametrize("draw", ["weighted", "uniform"])
def test_every_step_matches_the_oracle(prompt, draw):
    stream = Stream(prompt, steps=20, seed=prompt)
    codes, places = Codes(stream, SEED), BUDGET - SINK - WINDOW
    bounds, certain = [], 0
    for step, method, out in stream.run("vattention", {**SETTINGS, "draw": draw}):  # noqa: B007 - read afterwards
        length, expected = prompt + step + 1, []
        between = range(SINK, max(SINK, length - WINDOW))
        start = torch.rand(HK, generator=torch.Generator().manual_seed(hash((SEED, 1, length)))).tolist()
        for head in range(HK):
            chances, queries = dict.fromkeys(range(length), 1.0), group(stream.q[step], head)
            if length > BUDGET:
                rows = [softmax(codes.scores(query, head, between)) for query in queries]
                weights = [fmean(column) for column in zip(*rows, strict=True)]
                if draw == "weighted":
                    found = chances_of([0.97 * w + 0.03 / len(between) for w in weights], places)
                else:
                    heavy = sorted(range(len(between)), key=lambda i: -weights[i])[: round(places / 2)]
                    rest = (places - len(heavy)) / (len(between) - len(heavy))
                    found = [1.0 if i in heavy else rest for i in range(len(between))]
                certain += sum(chance > 1 - 1e-6 for chance in found)
                read = [between[i] for i in walk(found, start[head])]
                assert len(read) == places
                chances |= dict(zip(between, found, strict=True))
            tokens = range(length) if length <= BUDGET else [*range(SINK), *read, *range(length - WINDOW, length)]
            for query in queries:
                own, variance = attend(stream, query, head, tokens, chances)
                expected.append(own)
                if length > BUDGET:
                    bounds.append(NormalDist().inv_cdf(0.975) * math.sqrt(variance))
        assert same(out, torch.tensor(expected, dtype=torch.float64)), f"step {step}"
    told = method.statistics()
    assert told["error_bound_mean"] == pytest.approx(fmean(bounds), rel=1e-4)
    assert told["error_bound_max"] == pytest.approx(max(bounds), rel=1e-4)
    assert told["tokens_certain_mean"] == pytest.approx(certain * G / len(bounds))
    counted = method.context.counters.cache()
    assert counted.pages_requested == HK * places * (len(bounds) // H)
    assert counted.misses > 0


def full(stream, step):
    """Full attention of a step, [H, d]."""
    length = stream.prompt + step + 1
    q, k, v = stream.q[step].double().view(HK, G, D), stream.k[:, :length].double(), stream.v[:, :length].double()
    return ((q @ k.transpose(1, 2) * SOFTMAX.scale).softmax(-1) @ v).view(H, D)


@pytest.mark.parametrize("draw", ["weighted", "uniform"])
def test_estimates_are_right_on_average_and_within_their_bounds(draw):
    """The audit: every query head of every draw is compared with attention to everything."""
    stream, within, off = Stream(400, steps=2, seed=2), [], []
    stream.k /= 2  # attention that is spread over many tokens
    stream.v[..., 0] += 1  # values that do not cancel
    exact = full(stream, 1)
    for seed in range(60):
        *_, (_, method, out) = stream.run("vattention", {**SETTINGS, "budget": 120, "seed": seed, "draw": draw})
        bound = method.statistics()
        off.append(out.double() - exact)
        errors = off[-1].norm(dim=1) / exact.norm(dim=1)
        assert errors.mean() < bound["error_bound_max"]
        within.append(float((errors <= bound["error_bound_mean"]).double().mean()))
    assert fmean(within) >= 0.95
    alone = torch.stack(off).norm(dim=2).mean()
    assert torch.stack(off).mean(0).norm(dim=1).mean() < alone / 4  # errors of 60 draws cancel


def test_tokens_are_drawn_by_their_chances():
    generator = torch.Generator().manual_seed(1)
    chances = proportional((3 * torch.randn(2, 90, generator=generator)).softmax(1), 20)
    torch.testing.assert_close(chances.sum(1), torch.full((2,), 20.0))
    assert (chances == 1).any(1).all()
    counts = torch.zeros(2, 90)
    for start in (torch.arange(500) + 0.5) / 500:
        counts.scatter_add_(1, drawn(chances, 20, start.expand(2)), torch.ones(2, 20))
    torch.testing.assert_close(counts / 500, chances, atol=4e-3, rtol=0)


@pytest.mark.parametrize(("n", "places"), [(2, 1), (9, 8), (300, 37)])
def test_equal_weights_have_equal_chances(n, places):
    chances = proportional(torch.full((1, n), 1 / n), places)
    torch.testing.assert_close(chances, torch.full((1, n), places / n))
    assert len(drawn(chances, places, torch.tensor([0.0]))[0].unique()) == places


def test_no_memory_is_held_for_a_weight():
    """The device holds a budget of tokens and the codes, whatever is drawn."""
    sizes = {
        draw: new_method("vattention", {**SETTINGS, "draw": draw}, layers(), 500).footprint().device
        for draw in ("weighted", "uniform")
    }
    assert sizes["weighted"] == sizes["uniform"]
