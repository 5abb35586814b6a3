"""Attention to a part of a prompt against loops over queries and keys, in float64."""

import math

import pytest
import torch

import kvcli.kernels.prefill_attention as kernels
from kvcli.kernels.prefill_attention import (
    AShape,
    VerticalSlash,
    prefill_attention,
    sparse_attention,
    sparse_attention_ref,
    vertical_slash,
)
from kvcli.kernels.softmax import Softmax

H, HK, D = 4, 2, 8
CPU = torch.device("cpu")
M, N, ROWS = 21, 50, 8
SOFTMAX = Softmax(0.4)


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


Q, K, V = random(H, M, D, seed=1), random(HK, N, D, seed=2), random(HK, N, D, seed=3)
COLUMNS = random(H, N, seed=4) > 1
DIAGONALS = torch.tensor([[0, 1, 30], [0, 9, 49], [0, 2, 3], [0, 17, 25]])


def scores(head, i, keys):
    return [0.4 * sum(a * b for a, b in zip(Q[head, i].tolist(), K[head // 2, j].tolist(), strict=True)) for j in keys]


def keys_of(pattern, head, i):
    """What query i sees: up to its own position, what any query of its block of `ROWS` does."""
    own, first = N - M + i, N - M + i // ROWS * ROWS
    block = range(first, min(first + ROWS, N))
    if isinstance(pattern, AShape):
        return [j for j in range(own + 1) if j < pattern.sink or j > first - pattern.window]
    there = {at - int(distance) for at in block for distance in pattern.diagonals[head]}
    return [j for j in range(own + 1) if bool(pattern.columns[head, j]) or j in there]


@pytest.mark.parametrize("attend", [sparse_attention, sparse_attention_ref])
@pytest.mark.parametrize(
    "pattern", [AShape(3, 6, CPU), VerticalSlash(COLUMNS, DIAGONALS)], ids=lambda p: type(p).__name__
)
def test_a_query_attends_to_what_its_block_sees(pattern, attend):
    out, lse = attend(Q, K, V, SOFTMAX, pattern, ROWS)
    left_out = 0
    for head in range(H):
        for i in range(M):
            keys = keys_of(pattern, head, i)
            left_out += N - M + i + 1 - len(keys)
            exps = [math.exp(score) for score in scores(head, i, keys)]
            expected = sum(e * V[head // 2, j] for e, j in zip(exps, keys, strict=True)) / sum(exps)
            assert torch.allclose(out[head, i], expected, rtol=1e-5)
            assert float(lse[head, i]) == pytest.approx(math.log(sum(exps)), rel=1e-5)
    assert left_out > H * M * 5


@pytest.mark.parametrize("rows", [5, 64])
def test_columns_and_diagonals_are_those_that_the_newest_queries_look_at(rows, monkeypatch):
    monkeypatch.setattr(kernels, "ROWS", rows)
    monkeypatch.setattr(kernels, "ALWAYS", 2)
    found = vertical_slash(Q, K, SOFTMAX, 6, 7)
    for head in range(H):
        columns, distances = [0.0] * N, [0.0] * N
        for i in range(max(0, M - rows), M):
            own = N - M + i
            exps = [math.exp(score) for score in scores(head, i, range(own + 1))]
            for j, e in enumerate(exps):
                columns[j] += e / sum(exps)
                distances[own - j] += e / sum(exps)
        best = [sorted(range(2, N), key=lambda at, sums=sums: -sums[at]) for sums in (columns, distances)]
        assert found.columns[head].nonzero()[:, 0].tolist() == sorted([0, 1, *best[0][:4]])
        assert sorted(found.diagonals[head].tolist()) == sorted([0, 1, *best[1][:5]])


@pytest.mark.parametrize("softmax", [Softmax(0.4), Softmax(0.6, softcap=2.0)])
def test_all_there_is_is_causal_attention(softmax):
    everything = [AShape(1, N, CPU), vertical_slash(Q, K, softmax, N, 1), vertical_slash(Q, K, softmax, 1, N)]
    expected = prefill_attention(Q, K, V, softmax)
    for pattern in everything:
        out, _ = sparse_attention(Q, K, V, softmax, pattern, ROWS)
        assert torch.allclose(out, expected, rtol=1e-5, atol=1e-7)
