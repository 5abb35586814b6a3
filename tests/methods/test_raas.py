"""RaaS against a slow re-derivation in float64 and plain loops, sharing no code with it."""

import math

import pytest
import torch
from driver import HK, D, H, Stream, layers
from engine import new_method

from kvcli.methods import get_method

P, WINDOW, G = 4, 2, H // HK  # WINDOW in pages of 4 tokens
SETTINGS = {"budget": 40, "sink": 3, "window": 4 * WINDOW, "page_size": P, "threshold": 0.12}


def softmax(values):
    top = max(values)
    exps = [math.exp(value - top) for value in values]
    return [value / sum(exps) for value in exps]


class Oracle:
    """One layer: pages held by each KV head as {page: stamp}."""

    def __init__(self, stream, budget, threshold, pool):
        self.k, self.v = stream.k.double().tolist(), stream.v.double().tolist()
        self.threshold, self.pool = threshold, pool
        self.protected = max(1, -(-stream.prompt // P))  # the prompt's pages and that of the sinks
        self.room = max(budget // P, self.protected + WINDOW)
        self.held = [dict.fromkeys(range(-(-stream.prompt // P)), 0) for _ in range(HK)]
        self.evicted = 0

    def step(self, at, queries):
        """Token `at` comes; returns what the query heads see and read."""
        page, out = at // P, []
        for head in range(HK):
            held = self.held[head]
            if page not in held:
                if len(held) == self.room:
                    loose = [old for old in held if self.protected <= old <= page - WINDOW]
                    del held[min(loose, key=lambda old: (held[old], old))]
                    self.evicted += 1
                held[page] = at + 1
            tokens = sorted(token for old in held for token in range(old * P, min(old * P + P, at + 1)))
            group = [query.double().tolist() for query in queries[head * G : head * G + G]]
            out += [self.attention(head, query, tokens) for query in group]
            full = [old for old in held if (old + 1) * P <= at + 1]
            if full:
                shares = [softmax([self.bound(head, query, old) for old in full]) for query in group]
                for old, share in zip(full, zip(*shares, strict=True), strict=True):
                    if self.pool(share) > self.threshold:
                        held[old] = at + 1
        return torch.tensor(out, dtype=torch.float64)

    def bound(self, head, query, page):
        keys = self.k[head][page * P : page * P + P]
        best = (max(q * min(k[c] for k in keys), q * max(k[c] for k in keys)) for c, q in enumerate(query))
        return sum(best) / math.sqrt(D)

    def attention(self, head, query, tokens):
        products = (sum(a * b for a, b in zip(query, self.k[head][t], strict=True)) for t in tokens)
        weights = softmax([product / math.sqrt(D) for product in products])
        return [sum(w * self.v[head][t][c] for w, t in zip(weights, tokens, strict=True)) for c in range(D)]


def mean(values):
    return sum(values) / len(values)


@pytest.mark.parametrize(
    ("prompt", "threshold", "pooling"),
    [(11, 0.12, "max_s"), (1, 0.12, "mean_s"), (31, 0.12, "max_s"), (75, 0.08, "max_s"), (12, 0.0, "max_s")],
)
def test_every_step_matches_the_oracle(prompt, threshold, pooling):
    stream = Stream(prompt, steps=90, seed=prompt)
    oracle = Oracle(stream, SETTINGS["budget"], threshold, {"max_s": max, "mean_s": mean}[pooling])
    for step, method, out in stream.run("raas", {**SETTINGS, "threshold": threshold, "pooling": pooling}):
        expected = oracle.step(prompt + step, stream.q[step])
        assert torch.allclose(out.double(), expected, rtol=1e-4, atol=1e-5), f"output of step {step}"
        seen = method.attended(1)
        assert seen.shape == (HK, prompt + step + 1)
        for head, held in enumerate(oracle.held):
            assert seen[head].nonzero()[:, 0].div(P, rounding_mode="floor").unique().tolist() == sorted(held)
    assert method.statistics() == {"evicted_pages": oracle.evicted}
    assert oracle.evicted > 0
    kept = [sorted(page for page in held if page >= oracle.protected) for held in oracle.held]
    newest = list(range(kept[0][-1] - len(kept[0]) + 1, kept[0][-1] + 1))
    if prompt < 30:
        assert any(pages != newest for pages in kept) == (threshold > 0), "a threshold of 0 keeps the newest pages"


def test_the_prompt_is_protected_and_what_is_held_stays_within_the_budget():
    stream = Stream(21, steps=200, seed=4)
    for _, method, _ in stream.run("raas", SETTINGS):
        assert method.attended(1)[:, :24].all()
        assert method.attended(1).sum(1).max() <= SETTINGS["budget"]


def test_memory_is_the_budget_where_the_prompt_is_known():
    for prompt, slots in ((21, 10), (30, 10), (50, 13 + WINDOW)):
        method = new_method("raas", SETTINGS, layers(), prompt + 500, prompt_tokens=prompt)
        assert method.retrieval[1].k.shape[1] == slots * SETTINGS["page_size"]


def test_what_is_attended_to_beside_the_budget_is_the_prompt_s_doing():
    config = get_method("raas").Config(budget=48, sink=8, window=8, page_size=8)
    assert config.beside_budget(13, 10**6) == 0
    assert config.beside_budget(48, 1) == 8  # the window beside a prompt that takes the budget up
    assert config.beside_budget(49, 1) == 16
