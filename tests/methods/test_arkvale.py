"""ArkVale against a slow re-derivation in float64 and plain loops, sharing no code with it."""

import itertools
import math

import pytest
import torch
from driver import HK, D, Stream
from oracle import G, attention, best, group, same, softmax

from kvcli.kernels.page_scores import page_cuboid

P, SINK, WINDOW, SELECTED = 4, 1, 2, 4  # in pages of 4 tokens
SETTINGS = {"budget": P * (SINK + WINDOW + SELECTED), "sink": P * SINK, "window": P * WINDOW, "page_size": P}


class Oracle:
    """One layer, step after step: the pages every KV head holds, and what it costs to have them."""

    def __init__(self, stream, top):
        self.stream, self.top = stream, top  # how many pages must be the best
        self.held = [[] for _ in range(HK)]
        if -(-stream.prompt // P) <= SINK + WINDOW + SELECTED:
            self.held = [list(range(SINK, SINK + SELECTED)) for _ in range(HK)]
        self.misses = 0
        self.digests = {}

    def digest(self, head, page):
        """Per channel the least and the greatest of the page's cuboid."""
        if (head, page) not in self.digests:
            sides = []
            for channel in zip(*self.stream.k[head, page * P : page * P + P].double().tolist(), strict=True):
                centre = (max(channel) + min(channel)) / 2
                radius = sum(abs(centre - x) for x in channel) / P
                sides.append((centre - radius, centre + radius))
            self.digests[head, page] = sides
        return self.digests[head, page]

    def pages(self, head, q, candidates):
        scores = [0.0] * len(candidates)
        for query in group(q, head):
            bounds = [
                sum(max(x * low, x * high) for x, (low, high) in zip(query, self.digest(head, page), strict=True))
                / math.sqrt(D)
                for page in candidates
            ]
            scores = [a + b / G for a, b in zip(scores, softmax(bounds), strict=True)]
        order = [candidates[i] for i in best(scores, len(candidates))]
        wanted = order[: self.top]
        for rest in ([page for page in order if page in self.held[head]], order):
            wanted += [page for page in rest if page not in wanted]
        return wanted[:SELECTED]

    def step(self, step):
        length, q = self.stream.prompt + step + 1, self.stream.q[step]
        count = -(-length // P)
        if count <= SINK + WINDOW + SELECTED:
            return attention(self.stream, q, [range(length)] * HK)
        tokens = []
        for head in range(HK):
            wanted = self.pages(head, q, range(SINK, count - WINDOW))
            self.misses += len(set(wanted) - set(self.held[head]))
            self.held[head] = wanted
            chosen = [page * P + row for page in wanted for row in range(P)]
            tokens.append([*range(SINK * P), *chosen, *range((count - WINDOW) * P, length)])
        return attention(self.stream, q, tokens)


@pytest.mark.parametrize("prompt", [75, 21])  # retrieving from the first step; growing out of the budget
@pytest.mark.parametrize(("part", "top"), [(0.5, 2), (1.0, 4), (0.1, 1)])
def test_every_step_matches_the_oracle(prompt, part, top):
    stream = Stream(prompt, steps=60, seed=prompt)
    oracle = Oracle(stream, top)
    for step, method, out in stream.run("arkvale", {**SETTINGS, "top_part": part}):
        assert same(out, oracle.step(step)), f"output of step {step}"
        if stream.prompt + step + 1 > SETTINGS["budget"]:
            held = [set(pages) for pages in method.retrieval[1].resident.tolist()]
            assert held == [set(pages) for pages in oracle.held], f"pages held after step {step}"
    cache = method.context.counters.cache()
    active = sum(prompt + step + 1 > SETTINGS["budget"] for step in range(stream.steps))
    assert cache.pages_requested == active * HK * SELECTED
    assert 0 < cache.misses == oracle.misses
    assert cache.bytes_to_device == oracle.misses * 2 * P * D * 4
    assert cache.bytes_to_host == (prompt + stream.steps) // P * HK * 2 * P * D * 4


def test_fewer_pages_are_recalled_the_fewer_must_be_the_best():
    misses = []
    for part in (0.1, 0.5, 1.0):
        *_, (_, method, _) = Stream(75, steps=60, seed=4).run("arkvale", {**SETTINGS, "top_part": part})
        misses.append(method.context.counters.cache().misses)
    assert misses[0] < misses[1] < misses[2]


def test_two_sequences_side_by_side():
    streams = [Stream(75, 40, seed=1), Stream(22, 40, seed=2)]
    oracles = [Oracle(stream, 2) for stream in streams]
    for together in zip(*(stream.run("arkvale", SETTINGS) for stream in streams), strict=True):
        for oracle, (step, _, out) in zip(oracles, together, strict=True):
            assert same(out, oracle.step(step))


def test_digest_is_a_cuboid_about_the_middle_with_the_mean_distance():
    keys = torch.randn(HK, 5, 7, 6, generator=torch.Generator().manual_seed(0))
    digest = page_cuboid(keys)
    assert digest.shape == (HK, 5, 2, 6)
    for head, page, channel in itertools.product(range(HK), range(5), range(6)):
        values = keys[head, page, :, channel].double().tolist()
        centre = (max(values) + min(values)) / 2
        radius = sum(abs(value - centre) for value in values) / len(values)
        assert digest[head, page, :, channel].tolist() == pytest.approx([centre + radius, centre - radius], abs=1e-6)
