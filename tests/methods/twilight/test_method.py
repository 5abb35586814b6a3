"""Twilight against a slow re-derivation in float64, sharing no code with it."""

import itertools
import math

import pytest
import torch
from driver import HK, D, Stream
from engine import run
from families import VOCAB, tiny_model
from oracle import G, attention, best, dot, group, same, softmax

from kvcli.methods.twilight.kernels import nucleus as kept_by

P, SINK, WINDOW, SELECTED = 4, 1, 2, 6  # in pages
BUDGET = P * (SINK + WINDOW + SELECTED)
SETTINGS = {"budget": BUDGET, "sink": P * SINK, "window": P * WINDOW, "page_size": P, "dense_layers": 1}
STEPS = 60


def bounds_of(stream):
    """The least and the greatest of each channel of each full page: [head][page][channel]."""
    full = stream.k.shape[1] // P
    pages = [
        [stream.k[head, page * P : page * P + P].double().T.tolist() for page in range(full)] for head in range(HK)
    ]
    return [[[(min(channel), max(channel)) for channel in page] for page in head] for head in pages]


def four_bits(key):
    """A key as sixteen levels from its least channel to its greatest."""
    step = (max(key) - min(key)) / 15
    return [min(key) + step * round((x - min(key)) / step) for x in key]


def nucleus(weights, always, p):
    kept = {i for i, flag in enumerate(always) if flag}
    mass = sum(weights[i] for i in kept)
    for i in best(weights, len(weights)):
        if mass >= p:
            break
        if i not in kept:
            kept.add(i)
            mass += weights[i]
    return kept


class Oracle:
    """One layer: what every KV head attends to at a step, all that any of its query heads keeps."""

    def __init__(self, stream, p):
        self.stream, self.p = stream, p
        self.bounds = bounds_of(stream)
        self.keys = [[four_bits(key) for key in stream.k[head].double().tolist()] for head in range(HK)]

    def pages(self, head, queries, candidates):
        """The selector's choice: pages by their upper bound, the best of the softmaxed scores of the group."""
        scores = [0.0] * len(candidates)
        for query in queries:
            bounds = [
                sum(max(q * low, q * high) for q, (low, high) in zip(query, self.bounds[head][page], strict=True))
                / math.sqrt(D)
                for page in candidates
            ]
            scores = [max(a, b) for a, b in zip(scores, softmax(bounds), strict=True)]
        return [candidates[i] for i in best(scores, SELECTED)]

    def attended(self, step, head):
        """Tokens, and of how many they were taken."""
        length, queries = self.stream.prompt + step + 1, group(self.stream.q[step], head)
        count = -(-length // P)
        if count * P <= BUDGET:
            return set(range(length)), length
        pages = self.pages(head, queries, range(SINK, count - WINDOW))
        sink, window = range(SINK * P), range((count - WINDOW) * P, length)
        tokens = [*sink, *(page * P + row for page in sorted(pages) for row in range(P)), *window]
        always = [token in sink or token in window for token in tokens]
        kept = set()
        for query in queries:
            weights = softmax([dot(query, self.keys[head][token]) / math.sqrt(D) for token in tokens])
            kept |= {tokens[i] for i in nucleus(weights, always, self.p)}
        return kept, len(tokens)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("prompt", [61, 21])  # retrieving from the first step; growing out of the budget
@pytest.mark.parametrize("p", [0.3, 0.85, 0.99])
def test_every_step_matches_the_oracle(prompt, p, offload):
    stream = Stream(prompt, steps=STEPS, seed=prompt)
    oracle, weighed, kept = Oracle(stream, p), [], []
    for step, method, out in stream.run("twilight", {**SETTINGS, "p": p, "offload": offload}):  # noqa: B007 - read later
        heads = [oracle.attended(step, head) for head in range(HK)]
        assert same(out, attention(stream, stream.q[step], [tokens for tokens, _ in heads])), f"step {step}"
        if -(-(prompt + step + 1) // P) * P > BUDGET:
            weighed += [tokens for _, tokens in heads]
            kept += [len(tokens) for tokens, _ in heads]
    assert max(weighed) <= BUDGET
    assert method.statistics() == {
        "tokens_weighed_mean": sum(weighed) / len(weighed),
        "tokens_kept_mean": sum(kept) / len(kept),
        "tokens_kept_min": min(kept),
        "tokens_kept_max": max(kept),
    }
    if p == 0.3:
        assert min(kept) < max(kept) < BUDGET
    cache = method.context.counters.cache()
    assert cache.pages_requested == len(kept) * SELECTED
    page_bytes = 2 * P * D * 4
    if offload:
        assert 0 < cache.misses < cache.pages_requested
        assert cache.bytes_to_device == cache.misses * page_bytes
        assert cache.prefill_bytes_to_host == prompt // P * HK * page_bytes
        assert cache.bytes_to_host == (prompt + STEPS) // P * HK * page_bytes
    else:
        assert cache.hits == cache.pages_requested
        assert cache.misses == cache.bytes_to_device == cache.bytes_to_host == 0


@pytest.mark.parametrize("prompt", [1, 4, 21, 36, 37, 61])
def test_offload_is_the_same_from_prompts_of_any_length(prompt):
    stream = Stream(prompt, STEPS, seed=prompt)
    runs = [stream.run("twilight", {**SETTINGS, "offload": offload}) for offload in (False, True)]
    for (_, here, out), (step, there, same_out) in zip(*runs, strict=True):
        assert torch.equal(here.attended(1), there.attended(1)), f"tokens of step {step}"
        assert torch.allclose(out, same_out, atol=1e-6), f"step {step}"


def test_p_of_one_is_the_page_selector():
    stream = Stream(61, steps=60, seed=7)
    for (step, _, here), (_, _, there) in zip(
        stream.run("twilight", {**SETTINGS, "p": 1.0}), stream.run("quest", SETTINGS), strict=True
    ):
        assert torch.allclose(here, there, atol=1e-5), f"step {step}"


def test_the_more_of_the_attention_the_more_tokens():
    kept = []
    for p in (0.3, 0.6, 0.9, 1.0):
        *_, (_, method, _) = Stream(75, steps=40, seed=4).run("twilight", {**SETTINGS, "p": p})
        kept.append(method.statistics()["tokens_kept_mean"])
    assert kept == sorted(kept)
    assert kept[0] < kept[-1] == method.statistics()["tokens_weighed_mean"]


def test_two_sequences_side_by_side_and_models_with_caps_and_sinks():
    for family in ("gemma2", "gpt_oss"):
        model = tiny_model(family)
        ids = [torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (71, 40)]
        together = run(model, "twilight", SETTINGS, ids, 40)
        for sequence, prompt in zip(together, ids, strict=True):
            (alone,) = run(model, "twilight", SETTINGS, [prompt], 40)
            assert sequence.token_ids == alone.token_ids
            assert sequence.method.statistics() == alone.method.statistics()


def test_nothing_is_said_of_a_sequence_that_never_retrieved():
    *_, (_, method, _) = Stream(5, steps=3).run("twilight", SETTINGS)
    assert method.statistics() == {}


@pytest.mark.parametrize("p", [0.05, 0.3, 0.6, 0.85, 0.99])
@pytest.mark.parametrize("sharpness", [0.1, 1.0, 6.0])
def test_nucleus_is_the_least_set_that_holds_the_mass(p, sharpness):
    weights = (sharpness * torch.randn(HK, G, 40, generator=torch.Generator().manual_seed(5))).softmax(-1)
    always = torch.zeros(40, dtype=torch.bool)
    always[[0, 1, 38, 39]] = True
    kept = kept_by(weights, always, p)
    for head, g in itertools.product(range(HK), range(G)):
        row = weights[head, g].double().tolist()
        chosen = {0, 1, 38, 39}
        for j in sorted(range(2, 38), key=lambda j: (-row[j], j)):
            if sum(row[i] for i in chosen) >= p:
                break
            chosen.add(j)
        assert set(kept[head, g].nonzero().flatten().tolist()) == chosen


def test_the_ends_and_ties_of_the_nucleus():
    weights, never = torch.full((1, 10), 0.1), torch.zeros(10, dtype=torch.bool)
    assert kept_by(weights, never, 1.0).all()
    assert kept_by(weights, never, 0.25).nonzero()[:, 1].tolist() == [0, 1, 2]
    assert kept_by(weights, never, 0.0).sum() == 0
    assert kept_by(weights, ~never, 0.0).all()
