"""What RazorAttention computes, against loops in float64."""

import math

import pytest
import torch

import kvcli.kernels.repeat_attention as repeats
from kvcli.kernels.compensated_attention import compensated_attention, compensated_attention_ref
from kvcli.kernels.head_choice import choose_heads
from kvcli.kernels.repeat_attention import repeat_attention
from kvcli.kernels.softmax import Softmax

HK, G, D = 2, 3, 8
SOFTMAXES = [Softmax(0.3), Softmax(0.5, softcap=2.0), Softmax(0.3, sinks=torch.linspace(-1, 2, HK * G))]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def score(q, k, softmax):
    product = softmax.scale * sum(a * b for a, b in zip(q.double().tolist(), k.double().tolist(), strict=True))
    return product if softmax.softcap is None else softmax.softcap * math.tanh(product / softmax.softcap)


@pytest.mark.parametrize("softmax", SOFTMAXES)
@pytest.mark.parametrize("count", [1, 37])
@pytest.mark.parametrize("attention", [compensated_attention, compensated_attention_ref])
def test_the_mean_token_weighs_as_many_tokens_as_it_stands_for(attention, count, softmax):
    n = 13
    q, k, v = random(HK * G, D), random(HK, n, D, seed=1), random(HK, n, D, seed=2)
    mean_k, mean_v = random(HK, D, seed=3), random(HK, D, seed=4)
    out = attention(q, k, v, mean_k, mean_v, count, softmax)
    for head in range(HK * G):
        kv = head // G
        weights = [math.exp(score(q[head], key, softmax)) for key in k[kv]]
        weights.append(count * math.exp(score(q[head], mean_k[kv], softmax)))
        values = [*v[kv].double(), mean_v[kv].double()]
        norm = sum(weights) + (0 if softmax.sinks is None else math.exp(float(softmax.sinks[head])))
        expected = sum(weight * value for weight, value in zip(weights, values, strict=True)) / norm
        assert torch.allclose(out[head].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("softmax", SOFTMAXES)
@pytest.mark.parametrize(("first", "n", "limit"), [(1, 17, 1 << 26), (0, 16, 200), (1, 5, 100), (1, 2, 1)])
def test_repeats_are_summed_over_all_former_occurrences(first, n, limit, softmax, monkeypatch):
    monkeypatch.setattr(repeats, "SCORES_AT_ONCE", limit)
    period, length = 5, 16 + first
    q, k = random(HK * G, n, D), random(HK, length, D, seed=1)
    echo, induction = repeat_attention(q, k, softmax, period, first)
    for head in range(HK * G):
        sums = [0.0, 0.0]
        for row in range(n):
            at = length - n + row
            weights = [math.exp(score(q[head, row], key, softmax)) for key in k[head // G, : at + 1]]
            norm = sum(weights) + (0 if softmax.sinks is None else math.exp(float(softmax.sinks[head])))
            former = [j for j in range(first, at) if (at - j) % period == 0]
            sums[0] += sum(weights[j] for j in former) / norm
            sums[1] += sum(weights[j + 1] for j in former) / norm
        assert [float(echo[head]), float(induction[head])] == pytest.approx(sums, rel=1e-5)


def test_a_text_that_is_not_repeated_yet_has_no_former_occurrences():
    echo, induction = repeat_attention(random(4, 6, D), random(2, 6, D, seed=1), Softmax(1.0), 7, 0)
    assert echo.tolist() == induction.tolist() == [0.0] * 4


def test_heads_are_chosen_by_echo_first_and_then_by_induction():
    induction = torch.tensor([[0.9, 0.1, 0.8], [0.2, 0.7, -torch.inf]])
    echo = torch.tensor([[0.5, 0.9, 0.1], [0.1, 0.2, -torch.inf]])
    assert choose_heads(induction, echo, 0.6, 0.2).tolist() == [[True, True, True], [False, False, False]]
    assert choose_heads(induction, echo, 0.6, 0.0).tolist() == [[True, False, True], [False, True, False]]
    assert choose_heads(induction, echo, 0.2, 0.2).tolist() == [[False, True, False], [False] * 3]
    assert choose_heads(induction, echo, 0.15, 0.05).tolist() == [[True, False, False], [False] * 3]
    assert choose_heads(induction, echo, 1.0, 0.0).sum() == 5
    assert choose_heads(induction, echo, 0.0, 0.0).sum() == 0


def test_a_head_good_at_both_takes_one_place_and_ties_go_to_the_lower():
    scores = torch.tensor([[0.5, 0.9], [0.5, 0.5]])
    assert choose_heads(scores, scores, 0.5, 0.25).tolist() == [[True, True], [False, False]]
