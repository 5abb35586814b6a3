"""Selection by the last layer's query against a slow re-derivation in float64, sharing no code with it."""

import math

import pytest
import torch
from driver import HK, SOFTMAX, D, H, Stream, layers
from engine import new_method

P, SINK, WINDOW, SELECTED = 4, 1, 1, 2
BUDGET = P * (SINK + WINDOW + SELECTED)
SETTINGS = {"budget": BUDGET, "sink": P * SINK, "window": P * WINDOW, "page_size": P, "dense_layers": 1}
G = H // HK


def chosen(keys, queries, length):
    """Pages of a KV head by the mean over its queries of the softmaxed bounds; keys [n, d]."""
    pages = range(SINK, -(-length // P) - WINDOW)
    total = torch.zeros(len(pages), dtype=torch.float64)
    for query in queries.double():
        bounds = []
        for page in pages:
            block = keys[page * P : page * P + P].double()
            bounds.append(sum(max(float(query[c] * x) for x in block[:, c]) for c in range(D)) / math.sqrt(D))
        total += torch.tensor(bounds, dtype=torch.float64).softmax(0) / len(queries)
    order = sorted(range(len(pages)), key=lambda i: (-float(total[i]), i))
    return {pages[i] for i in order[:SELECTED]}


@pytest.mark.parametrize("dense", [0, 1])
def test_a_layer_reads_what_the_query_of_the_layer_before_chose(dense):
    first, second = Stream(30, 20, seed=1), Stream(30, 20, seed=2)
    method = new_method("freekv_layer", {**SETTINGS, "dense_layers": dense}, layers(), 50)
    for layer, stream in enumerate((first, second)):
        method.prefill(layer, stream.k[:, :30].clone(), stream.v[:, :30].clone(), stream.prompt_q[:, :0], SOFTMAX)
    missed, held = 0, [set() for _ in range(HK)]
    for step in range(20):
        length = 30 + step + 1
        method.context.counters.next_step()
        outs = [
            method.attend(layer, stream.q[step], stream.k[:, 30 + step], stream.v[:, 30 + step], SOFTMAX)
            for layer, stream in enumerate((first, second))
        ]
        asked = {0: first.q[step], 1: first.q[step]}  # the first layer by its own query
        for layer in range(dense, 2):
            stream = (first, second)[layer]
            for head in range(HK):
                mine = slice(head * G, head * G + G)
                pages = chosen(stream.k[head], asked[layer][mine], length)
                if layer == 1:
                    missed += len(pages - held[head])
                    held[head] = pages
                always = {*range(SINK * P), *range((-(-length // P) - WINDOW) * P, length)}
                tokens = sorted(always | {page * P + row for page in pages for row in range(P)})
                assert method.attended(layer)[head].nonzero()[:, 0].tolist() == tokens
                k, v = stream.k[head, tokens].double(), stream.v[head, tokens].double()
                expected = (stream.q[step][mine].double() @ k.T / math.sqrt(D)).softmax(-1) @ v
                assert torch.allclose(outs[layer][mine].double(), expected, rtol=1e-4, atol=1e-5)
    cache = method.context.counters.cache()
    assert cache.layers[1].misses == missed
    assert cache.bytes_exposed == (0 if dense else cache.layers[0].bytes_to_device)
