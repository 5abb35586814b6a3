"""What H2O, SnapKV and CAKE score a prompt's tokens by, against loops in float64."""

import math
import statistics

import pytest
import torch

import kvcli.kernels.prefill_attention as kernels
from kvcli.kernels.softmax import Softmax
from kvcli.methods.cake import attention_dynamics
from kvcli.methods.h2o import column_sums
from kvcli.methods.snapkv import window_votes

HK, G, D = 2, 3, 8
SINKS = torch.randn(HK * G, generator=torch.Generator().manual_seed(9))
SOFTMAXES = [Softmax(0.3), Softmax(0.5, softcap=2.0), Softmax(0.3, sinks=SINKS)]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights(q, k, softmax):
    """Every weight [head][row][key] of the newest rows, in plain loops."""
    rows, length = q.shape[1], k.shape[1]
    out = []
    for head in range(HK * G):
        out.append([])
        for row in range(rows):
            scores = []
            for key in k[head // G, : length - rows + row + 1].double().tolist():
                score = softmax.scale * sum(a * b for a, b in zip(q[head, row].double().tolist(), key, strict=True))
                scores.append(
                    score if softmax.softcap is None else softmax.softcap * math.tanh(score / softmax.softcap)
                )
            total = sum(math.exp(score) for score in scores)
            total += 0 if softmax.sinks is None else math.exp(float(softmax.sinks[head]))
            out[-1].append([math.exp(score) / total for score in scores] + [0.0] * (rows - row - 1))
    return out


def group_mean(per_head, head):
    """Mean over the query heads of a KV head, of lists."""
    return [statistics.fmean(values) for values in zip(*per_head[head * G : head * G + G], strict=True)]


def neighbours(values, at, kernel):
    """The values no more than kernel // 2 away; none stands beyond the ends."""
    return values[max(0, at - kernel // 2) : at + kernel // 2 + 1]


@pytest.mark.parametrize("softmax", SOFTMAXES)
@pytest.mark.parametrize(("rows", "length"), [(13, 13), (5, 13), (1, 1)])
@pytest.mark.parametrize("at_once", [1, 80, 1 << 20])
def test_column_sums(rows, length, softmax, at_once, monkeypatch):
    monkeypatch.setitem(kernels.WEIGHTS_AT_ONCE, "cpu", at_once)
    monkeypatch.setattr(kernels, "LEAST_ROWS", 2)
    q, k = random(HK * G, rows, D, seed=1), random(HK, length, D, seed=2)
    expected = [[sum(column) for column in zip(*head, strict=True)] for head in weights(q, k, softmax)]
    found = column_sums(q, k, softmax)
    assert torch.allclose(found.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5)
    if softmax.sinks is None:
        assert found.sum() == pytest.approx(HK * G * rows)


@pytest.mark.parametrize("softmax", SOFTMAXES)
@pytest.mark.parametrize("kernel", [1, 3, 7])
@pytest.mark.parametrize(("rows", "length"), [(5, 17), (1, 2)])
def test_window_votes(rows, length, kernel, softmax):
    q, k = random(HK * G, rows, D, seed=3), random(HK, length, D, seed=4)
    before = length - rows
    sums = [[sum(column) for column in zip(*head, strict=True)][:before] for head in weights(q, k, softmax)]
    pooled = [[max(neighbours(row, at, kernel)) for at in range(before)] for row in sums]
    expected = torch.tensor([group_mean(pooled, head) for head in range(HK)], dtype=torch.float64)
    assert torch.allclose(window_votes(q, k, softmax, kernel).double(), expected, rtol=1e-5)


@pytest.mark.parametrize("softmax", SOFTMAXES)
@pytest.mark.parametrize("kernel", [1, 5])
@pytest.mark.parametrize(("rows", "length"), [(5, 17), (2, 3)])
def test_attention_dynamics(rows, length, kernel, softmax):
    q, k = random(HK * G, rows, D, seed=5), random(HK, length, D, seed=6)
    before, every = length - rows, weights(q, k, softmax)
    entropy = -sum(w * math.log(w) for head in every for row in head for w in row[:before])
    columns = [list(zip(*head, strict=True))[:before] for head in every]
    variances = [[statistics.variance(column) for column in head] for head in columns]
    worth = [
        [statistics.fmean(column) + 50 * variance for column, variance in zip(head, moved, strict=True)]
        for head, moved in zip(columns, variances, strict=True)
    ]
    smooth = [[sum(neighbours(row, at, kernel)) / kernel for at in range(before)] for row in worth]
    found = attention_dynamics(q, k, softmax, 50.0, kernel)
    assert found.dispersion == pytest.approx(entropy, rel=1e-5)
    assert found.shift == pytest.approx(sum(map(sum, variances)), rel=1e-4)
    expected = torch.tensor([group_mean(smooth, head) for head in range(HK)], dtype=torch.float64)
    assert torch.allclose(found.indicator.double(), expected, rtol=1e-4)


def test_entropy_of_what_is_never_looked_at_is_zero():
    q, k = torch.full((1, 2, 1), 100.0), torch.tensor([[[3.0], [-3.0], [0.0], [0.0]]])
    assert attention_dynamics(q, k, Softmax(1.0), 0.0, 1).dispersion == 0
