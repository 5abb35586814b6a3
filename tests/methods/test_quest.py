"""Quest against a slow re-derivation in float64, sharing no code with it."""

import math

import pytest
import torch
from driver import HK, D, H, Stream

P, SINK, WINDOW, SELECTED = 4, 1, 2, 3  # in pages
SETTINGS = {"budget": P * (SINK + WINDOW + SELECTED), "sink": P * SINK, "window": P * WINDOW, "page_size": P}
G = H // HK


def softmax(values):
    exps = [math.exp(value - max(values)) for value in values]
    return [value / sum(exps) for value in exps]


def selection(stream, head, step, length):
    return selection_of(stream, head, stream.q[step][head * G : head * G + G], length)


def selection_of(stream, head, queries, length):
    """Pages that these queries of a KV head choose together."""
    candidates = range(SINK, -(-length // P) - WINDOW)
    best = [0.0] * len(candidates)
    for query in (query.double().tolist() for query in queries):
        bounds = []
        for page in candidates:
            keys = stream.k[head, page * P : page * P + P].double().tolist()
            sides = [(min(channel), max(channel)) for channel in zip(*keys, strict=True)]
            bounds.append(
                sum(max(q * low, q * high) for q, (low, high) in zip(query, sides, strict=True)) / math.sqrt(D)
            )
        best = [max(a, b) for a, b in zip(best, softmax(bounds), strict=True)]  # max_s pooling
    order = sorted(range(len(candidates)), key=lambda i: (-best[i], i))
    return sorted(candidates[i] for i in order[:SELECTED])


def test_every_step_matches_the_oracle():
    stream = Stream(21, steps=60)
    for step, method, out in stream.run("quest", {**SETTINGS, "dense_layers": 0}):  # noqa: B007 - read afterwards
        length = stream.prompt + step + 1
        for head in range(HK):
            tokens = list(range(length))
            if length > SETTINGS["budget"]:
                pages = selection(stream, head, step, length)
                recent = range((-(-length // P) - WINDOW) * P, length)
                tokens = [*range(SINK * P), *(page * P + row for page in pages for row in range(P)), *recent]
            k, v = stream.k[head, tokens].double(), stream.v[head, tokens].double()
            q = stream.q[step][head * G : head * G + G].double()
            expected = (q @ k.T / math.sqrt(D)).softmax(-1) @ v
            assert torch.allclose(out[head * G : head * G + G].double(), expected, rtol=1e-4, atol=1e-5), f"step {step}"
    cache = method.context.counters.cache()
    active = sum(stream.prompt + step + 1 > SETTINGS["budget"] for step in range(stream.steps))
    assert cache.pages_requested == cache.hits == active * HK * SELECTED
    assert cache.misses == cache.bytes_to_device == cache.bytes_to_host == 0


@pytest.mark.parametrize("prompt", [21, 60])
def test_each_query_head_may_choose_for_itself(prompt):
    """At an equal budget for each head; a KV head is read for the union of what its query heads chose."""
    stream = Stream(prompt, steps=60, seed=4)
    requested = 0
    for step, method, out in stream.run("quest", {**SETTINGS, "dense_layers": 0, "pooling": "none"}):
        length = stream.prompt + step + 1
        for head in range(HK):
            union = set()
            for query in range(head * G, head * G + G):
                tokens = list(range(length))
                if length > SETTINGS["budget"]:
                    alone = [stream.q[step][query]]
                    pages = selection_of(stream, head, alone, length)
                    union |= set(pages)
                    recent = range((-(-length // P) - WINDOW) * P, length)
                    tokens = [*range(SINK * P), *(page * P + row for page in pages for row in range(P)), *recent]
                    assert len(tokens) <= SETTINGS["budget"]
                k, v = stream.k[head, tokens].double(), stream.v[head, tokens].double()
                expected = (stream.q[step][query].double() @ k.T / math.sqrt(D)).softmax(-1) @ v
                assert torch.allclose(out[query].double(), expected, rtol=1e-4, atol=1e-5), f"step {step}"
            requested += len(union)
            if union:
                always = length - len(range(SINK, -(-length // P) - WINDOW)) * P
                assert method.attended(1)[head].sum() == always + len(union) * P
    assert method.context.counters.cache().pages_requested == requested
    assert requested > HK * SELECTED * sum(prompt + step + 1 > SETTINGS["budget"] for step in range(60))
