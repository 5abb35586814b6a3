"""MagicPIG against a slow re-derivation in float64 and plain loops, sharing no code with it."""

import math
from dataclasses import replace

import pytest
import torch
from driver import HK, D, H, Stream, layers
from engine import new_method
from oracle import dot, group, same

from kvcli.kernels import _numba
from kvcli.kernels.softmax import Softmax

K, L, SINK, WINDOW = 4, 12, 3, 9
SETTINGS = {"bits": K, "tables": L, "sink": SINK, "window": WINDOW, "dense_layers": 1, "seed": 5}
STEPS = 40


def norm(x):
    return math.sqrt(dot(x, x))


def chance(query, key):
    """That two or more of L tables hash both alike, term by term of the binomial distribution."""
    p = 1 - math.acos(dot(query, key) / norm(query) / norm(key)) / math.pi
    return sum(math.comb(L, j) * p ** (K * j) * (1 - p**K) ** (L - j) for j in range(2, L + 1))


class Oracle:
    """One layer: what each query head samples at a step, and what its attention is estimated to be."""

    def __init__(self, stream, centred=True):
        self.stream = stream
        drawn = torch.randn(D, L * K, generator=torch.Generator().manual_seed(SETTINGS["seed"])).double().T.tolist()
        self.tables = [drawn[table * K : table * K + K] for table in range(L)]
        keys = stream.k.double().tolist()
        between = range(SINK, stream.prompt - WINDOW) or range(stream.prompt)
        self.keys = []
        for head in range(HK):
            middle = [sum(keys[head][t][c] for t in between) / len(between) if centred else 0 for c in range(D)]
            self.keys.append([[x - m for x, m in zip(key, middle, strict=True)] for key in keys[head]])
        self.hashes = [[self.hash(key) for key in head] for head in self.keys]
        self.read = self.sampled = self.candidates = 0

    def hash(self, x):
        return [tuple(dot(x, direction) > 0 for direction in table) for table in self.tables]

    def step(self, step, sinks=None):
        """The output [H, d], and for each KV head the tokens that it is read for."""
        length, out, read = self.stream.prompt + step + 1, [], []
        between = range(SINK, max(SINK, length - WINDOW))
        for head in range(HK):
            k, v = (x[head].double().tolist() for x in (self.stream.k, self.stream.v))
            wanted = set()
            for g, query in enumerate(group(self.stream.q[step], head)):
                mine = self.hash(query)
                own = [t for t in between if sum(a == b for a, b in zip(mine, self.hashes[head][t], strict=True)) >= 2]
                wanted |= set(own)
                self.sampled += len(own)
                tokens = [t for t in range(length) if t not in between or t in own]
                times = [1 / max(1e-4, chance(query, self.keys[head][t])) if t in own else 1 for t in tokens]
                exps = [n * math.exp(dot(query, k[t]) / math.sqrt(D)) for n, t in zip(times, tokens, strict=True)]
                total = sum(exps) + (0 if sinks is None else math.exp(float(sinks[head * (H // HK) + g])))
                out.append([sum(e * v[t][c] for e, t in zip(exps, tokens, strict=True)) / total for c in range(D)])
            self.candidates += len(between) * (H // HK)
            self.read += len(wanted)
            read.append(sorted(wanted))
        return torch.tensor(out, dtype=torch.float64), read


@pytest.mark.parametrize("prompt", [61, 9])  # sampling from the first step; growing out of sinks and window
@pytest.mark.parametrize("centred", [True, False])
def test_every_step_matches_the_oracle(prompt, centred):
    stream = Stream(prompt, steps=STEPS, seed=prompt)
    stream.k += 1.5  # a cone
    oracle = Oracle(stream, centred)
    for step, method, out in stream.run("magicpig", {**SETTINGS, "centred": centred}):
        expected, read = oracle.step(step)
        assert same(out, expected), f"output of step {step}"
        length = prompt + step + 1
        for mask, tokens in zip(method.attended(1).tolist(), read, strict=True):
            near = [t < SINK or t >= length - WINDOW for t in range(length)]
            assert mask == [held or t in tokens for t, held in enumerate(near)]
    cache, token = method.context.counters.cache(), 2 * D * 4
    assert 0 < cache.pages_requested == cache.misses == oracle.read
    assert cache.bytes_to_device == cache.bytes_exposed == oracle.read * token
    hashed = (prompt + STEPS - SINK - WINDOW) * HK * K * -(-L // 8)
    assert cache.bytes_to_host == (prompt + STEPS) * HK * token + hashed
    steps = sum(prompt + step + 1 > SINK + WINDOW for step in range(STEPS))
    assert method.statistics() == {
        "sampled_part": oracle.sampled / oracle.candidates,
        "tokens_sampled_mean": oracle.read / (steps * HK),
    }


@pytest.mark.parametrize("least", [1, 1 << 40])  # by loops, and by torch
def test_a_sample_that_is_read_in_its_place_is_the_one_that_is_brought(least, monkeypatch):
    monkeypatch.setattr(_numba, "LEAST", least)
    stream, found = Stream(61, steps=9, seed=6), []
    for one_memory in (True, False):
        method = new_method("magicpig", SETTINGS, layers(), 70)
        method.context.tiers = replace(method.context.tiers, one_memory=one_memory)
        method = type(method)(method.config, layers(), method.context)
        method.prefill(1, stream.k[:, :61].clone(), stream.v[:, :61].clone(), stream.prompt_q[:, :0], Softmax(1))
        assert (method.retrieval[1].in_place is not None) == one_memory
        assert (method.traffic(1, 61).recalled == 0) == one_memory
        for step, q in enumerate(stream.q):
            method.context.counters.next_step()
            found.append(method.attend(1, q, stream.k[:, 61 + step], stream.v[:, 61 + step], Softmax(D**-0.5)))
        found.append(method.context.counters.cache())
    *outs, counts = found[:10]
    assert counts == found[-1]
    torch.testing.assert_close(torch.stack(outs), torch.stack(found[10:-1]))


def test_logits_without_value_join_the_estimate():
    stream, sinks = Stream(40, steps=3, seed=2), torch.linspace(-1, 3, H)
    method, oracle = new_method("magicpig", SETTINGS, layers(), 50), Oracle(stream)
    method.prefill(1, stream.k[:, :40].clone(), stream.v[:, :40].clone(), stream.prompt_q[:, :0], Softmax(1))
    for step in range(3):
        softmax = Softmax(D**-0.5, sinks=sinks)
        out = method.attend(1, stream.q[step], stream.k[:, 40 + step], stream.v[:, 40 + step], softmax)
        assert same(out, oracle.step(step, sinks)[0])


def test_the_estimate_is_that_of_full_attention_on_average():
    """Of many draws: the sampled norm, and hence the outputs, gather about those of full attention."""
    stream = Stream(61, steps=1, seed=3)
    settings = {**SETTINGS, "tables": 40}
    outs = [next(stream.run("magicpig", {**settings, "seed": seed}))[2].double() for seed in range(60)]
    (whole,) = [out.double() for _, _, out in stream.run("full", {})]
    (near,) = [out.double() for _, _, out in stream.run("streaming", {"budget": SINK + WINDOW, "sink": SINK})]
    error = (torch.stack(outs).mean(0) - whole).abs().mean()
    assert error < 0.3 * (outs[0] - whole).abs().mean()
    assert error < 0.1 * (near - whole).abs().mean()


def test_the_seed_decides_what_is_sampled():
    stream = Stream(61, steps=3, seed=4)
    outs = [[out for _, _, out in stream.run("magicpig", {**SETTINGS, "seed": seed})] for seed in (1, 1, 2)]
    assert all(torch.equal(a, b) for a, b in zip(*outs[:2], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(*outs[1:], strict=True))
