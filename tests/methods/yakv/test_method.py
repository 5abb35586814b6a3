"""YAKV against a slow re-derivation in float64 and plain loops, sharing no code with it."""

import pytest
import torch
from driver import HK, Stream
from oracle import G, attention, best, group, same, softmax
from two_bit_oracle import LEVELS, Codes

from kvcli.kernels import _numba
from kvcli.methods.yakv.kernels import encode_two_bits, quantiser, two_bit_products, two_bit_products_ref

BUDGET = 30
SETTINGS = {"budget": BUDGET, "sink": 2, "window": 5, "seed": 3}


@pytest.mark.parametrize("prompt", [61, 22])  # retrieving from the first step; growing out of the budget
@pytest.mark.parametrize("variant", [{}, {"centred": False}, {"pooling": "mean_q"}, {"pooling": "max_qk"}], ids=str)
def test_every_step_matches_the_oracle(prompt, variant):
    stream = Stream(prompt, steps=40, seed=prompt)
    stream.k += 1.5  # a cone
    codes = Codes(stream, SETTINGS["seed"], variant.get("centred", True))
    pooling = variant.get("pooling", "max_s")
    for step, _, out in stream.run("yakv", {**SETTINGS, **variant}):
        length, tokens = prompt + step + 1, []
        for head in range(HK):
            candidates, selected = range(2, length - 5), range(2, length - 5)
            if length > BUDGET:
                queries = group(stream.q[step], head)
                if pooling == "mean_q":
                    queries = [[sum(channel) / G for channel in zip(*queries, strict=True)]]
                rows = [codes.scores(query, head, candidates) for query in queries]
                rows = [softmax(row) for row in rows] if pooling == "max_s" else rows
                pooled = [max(values) for values in zip(*rows, strict=True)]
                selected = [candidates[i] for i in best(pooled, BUDGET - 7)]
            tokens.append([*range(2), *selected, *range(length - 5, length)])
        assert same(out, attention(stream, stream.q[step], tokens)), f"step {step}"


def test_the_quantiser_is_the_published_one():
    levels, thresholds = quantiser()
    assert levels.tolist() == pytest.approx(LEVELS, abs=1e-4)
    assert thresholds.tolist() == pytest.approx([-0.9816, 0, 0.9816], abs=1e-4)


@pytest.mark.parametrize(("width", "group", "n"), [(8, 1, 4100), (64, 3, 1500), (128, 4, 700)])
def test_the_loop_equals_torch(width, group, n, monkeypatch):
    generator = torch.Generator().manual_seed(n)
    keys, q = (torch.randn(2, rows, width, generator=generator) for rows in (n, group))
    keys[1, 7] = 0
    codes, sizes = encode_two_bits(keys)
    assert sizes[1, 7] == 0
    tokens = range(3, n - 2)
    monkeypatch.setattr(_numba, "LEAST", 1)
    found = two_bit_products(q, codes, sizes, tokens)
    expected = two_bit_products_ref(q.double(), codes[:, 3 : n - 2], sizes[:, 3 : n - 2])
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)
    monkeypatch.setattr(_numba, "numba", None)
    torch.testing.assert_close(two_bit_products(q, codes, sizes, tokens), found, atol=1e-4, rtol=1e-4)


def test_two_bits_keep_seven_eighths_of_a_normal_variable():
    x = torch.randn(1, 400, 64, generator=torch.Generator().manual_seed(1))
    codes, sizes = encode_two_bits(x)
    held = two_bit_products_ref(torch.eye(64)[None], codes, sizes).transpose(1, 2)
    assert float((held - x).square().mean()) == pytest.approx(0.1175, abs=0.01)  # Max, 1960, table I
