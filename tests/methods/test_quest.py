"""Quest against a slow re-derivation in float64, sharing no code with it."""

import math

import pytest
import torch
from driver import HK, D, H, Stream
from pydantic import ValidationError

from kvcli.methods.quest import QuestConfig

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


@pytest.mark.parametrize("offload", [False, True])
def test_every_step_matches_the_oracle(offload):
    stream, held, misses = Stream(21, steps=60), [set(range(SINK, SINK + SELECTED))] * HK, 0
    for step, method, out in stream.run("quest", {**SETTINGS, "dense_layers": 0, "offload": offload}):
        length = stream.prompt + step + 1
        for head in range(HK):
            tokens = list(range(length))
            if length > SETTINGS["budget"]:
                pages = selection(stream, head, step, length)
                misses += len({*pages} - held[head])
                held[head] = {*pages}
                recent = range((-(-length // P) - WINDOW) * P, length)
                tokens = [*range(SINK * P), *(page * P + row for page in pages for row in range(P)), *recent]
            k, v = stream.k[head, tokens].double(), stream.v[head, tokens].double()
            q = stream.q[step][head * G : head * G + G].double()
            expected = (q @ k.T / math.sqrt(D)).softmax(-1) @ v
            assert torch.allclose(out[head * G : head * G + G].double(), expected, rtol=1e-4, atol=1e-5), f"step {step}"
        if offload and length > SETTINGS["budget"]:
            assert [{*pages} for pages in method.retrieval[1].resident.tolist()] == held, (
                f"pages held after step {step}"
            )
    cache = method.context.counters.cache()
    active = sum(stream.prompt + step + 1 > SETTINGS["budget"] for step in range(stream.steps))
    assert cache.pages_requested == active * HK * SELECTED
    page_bytes = 2 * P * D * 4
    if offload:
        assert 0 < cache.misses == misses < cache.pages_requested
        assert cache.bytes_to_device == misses * page_bytes
        assert cache.prefill_bytes_to_host == stream.prompt // P * HK * page_bytes
        assert cache.bytes_to_host == (stream.prompt + stream.steps) // P * HK * page_bytes
    else:
        assert cache.hits == cache.pages_requested
        assert cache.misses == cache.bytes_to_device == cache.bytes_to_host == 0


@pytest.mark.parametrize("prompt", [1, 4, 21, 24, 25, 60])
def test_offload_is_the_same_from_prompts_of_any_length(prompt):
    stream = Stream(prompt, 60, seed=prompt)
    runs = [stream.run("quest", {**SETTINGS, "offload": offload}) for offload in (False, True)]
    for (_, here, out), (step, there, same) in zip(*runs, strict=True):
        assert torch.equal(here.attended(1), there.attended(1)), f"pages of step {step}"
        assert torch.allclose(out, same, atol=1e-6), f"step {step}"


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
    with pytest.raises(ValidationError, match="offload has room for one selection"):
        QuestConfig(pooling="none", offload=True)
