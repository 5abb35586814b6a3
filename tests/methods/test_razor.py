"""RazorAttention against a slow re-derivation in float64 and plain loops, sharing no code with it."""

import math

import pytest
import torch
from driver import HK, D, H, Stream, layers
from engine import new_method
from pydantic import ValidationError
from safetensors.torch import save_file

from kvcli.errors import ExitCode, KvcliError
from kvcli.kernels.softmax import Softmax
from kvcli.methods import get_method
from kvcli.methods.razor import choose_heads
from kvcli.models.geometry import LayerGeometry
from kvcli.runtime.retrieval_heads import HeadScores

SINK, WINDOW, G = 3, 13, H // HK
SETTINGS = {"sink": SINK, "window": WINDOW, "window_part": 0.0, "dense_layers": 1}


@pytest.fixture
def heads_file(tmp_path):
    def write(*rows):
        save_file({"heads": torch.tensor(rows)}, tmp_path / "heads.safetensors")
        return str(tmp_path / "heads.safetensors")

    return write


def weighted(query, keys, values, weights, sink=None):
    """Attention of one query in which key j counts weights[j] times, and a valueless logit once."""
    scores = [sum(a * b for a, b in zip(query, key, strict=True)) / math.sqrt(D) for key in keys]
    top = max(scores)
    exps = [weight * math.exp(score - top) for score, weight in zip(scores, weights, strict=True)]
    norm = sum(exps) + (0 if sink is None else math.exp(sink - top))
    return [sum(e * value[c] for e, value in zip(exps, values, strict=True)) / norm for c in range(D)]


def mean(rows):
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def expected(stream, step, keep, compensation=True, sinks=None):
    length, out = stream.prompt + step + 1, []
    gone = range(SINK, length - WINDOW)
    for head, query in enumerate(stream.q[step].double().tolist()):
        k, v = (x[head // G].double().tolist() for x in (stream.k, stream.v))
        sink = None if sinks is None else float(sinks[head])
        tokens = [t for t in range(length) if keep[head // G] or t not in gone]
        keys, values, weights = [k[t] for t in tokens], [v[t] for t in tokens], [1] * len(tokens)
        if compensation and len(tokens) < length:
            keys.append(mean([k[t] for t in gone]))
            values.append(mean([v[t] for t in gone]))
            weights.append(len(gone))
        out.append(weighted(query, keys, values, weights, sink))
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("keep", [(True, False), (False, True), (False, False), (True, True)])
@pytest.mark.parametrize("compensation", [True, False])
@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 75])
def test_every_step_matches_the_oracle(prompt, compensation, keep, heads_file):
    stream = Stream(prompt, steps=60, seed=prompt)
    settings = {**SETTINGS, "compensation": compensation, "heads": heads_file([False, False], list(keep))}
    for step, method, out in stream.run("razor", settings):
        if step % 7 == 0 or step < 5:
            wanted = expected(stream, step, keep, compensation)
            assert torch.allclose(out.double(), wanted, rtol=1e-4, atol=1e-5), f"output of step {step}"
            length = prompt + step + 1
            near = [t < SINK or t >= length - WINDOW for t in range(length)]
            assert method.attended(1).tolist() == [[True] * length if kept else near for kept in keep]
    assert method.statistics() == {"retrieval_heads": [[1, head] for head in range(HK) if keep[head]]}


def test_logits_without_value_go_to_the_heads_they_belong_to(heads_file):
    stream, sinks = Stream(40, steps=3, seed=2), torch.linspace(-1, 3, H)
    method = new_method("razor", {**SETTINGS, "heads": heads_file([False, False], [False, True])}, layers(), 50)
    softmax = Softmax(D**-0.5, sinks=sinks)
    method.prefill(1, stream.k[:, :40].clone(), stream.v[:, :40].clone(), stream.prompt_q[:, :0], softmax)
    for step in range(3):
        out = method.attend(1, stream.q[step], stream.k[:, 40 + step], stream.v[:, 40 + step], softmax)
        wanted = expected(stream, step, (False, True), sinks=sinks)
        assert torch.allclose(out.double(), wanted, rtol=1e-4, atol=1e-5)


def test_the_mean_token_is_the_better_stand_in_for_what_was_dropped(heads_file):
    """Keys that are all alike: dropping loses most of the weight, one token for all of them nothing."""
    stream = Stream(200, steps=1, seed=5)
    stream.k, stream.v = stream.k[:, :1].expand(-1, 201, -1), stream.v[:, :1].expand(-1, 201, -1).clone()
    stream.v[:, SINK : 200 - WINDOW] += 1
    whole = expected(stream, 0, (True, True))
    heads = heads_file([False, False], [False, False])
    ((_, _, kept),) = stream.run("razor", {**SETTINGS, "heads": heads})
    ((_, _, lost),) = stream.run("razor", {**SETTINGS, "heads": heads, "compensation": False})
    assert torch.allclose(kept.double(), whole, atol=1e-5)
    assert (lost.double() - whole).abs().mean() > 0.5


def made(known, settings=SETTINGS, count=3, capacity=1000, prompt=500):
    geometry = [LayerGeometry(i, H, HK, D, 8 if i == 1 else None, True) for i in range(count)]
    return new_method("razor", settings, geometry, capacity, prompt_tokens=prompt, prepared=known)


def test_heads_are_those_with_the_best_scores_among_layers_that_are_neither_dense_nor_sliding():
    scores = torch.tensor([[0.9, 0.9], [-torch.inf, -torch.inf], [0.1, 0.2], [0.4, 0.3]])
    method = made({"head_scores": HeadScores(echo=scores.flip(1), induction=scores)}, count=4)
    assert method.statistics()["retrieval_heads"] == [[3, 0]]  # 0.15 of 4, rounded up
    half = made({"head_scores": HeadScores(scores.flip(1), scores)}, {**SETTINGS, "sparsity": 0.5, "echo": 0.25}, 4)
    assert half.statistics()["retrieval_heads"] == [[3, 0], [3, 1]]


def test_a_file_needs_no_probe():
    method = get_method("razor")
    assert method.needs(method.Config()) == ("head_scores",)
    assert method.needs(method.Config(heads="some.safetensors")) == ()


def test_memory_is_that_of_the_plan_whichever_heads_they_are():
    scores = torch.tensor([[0.0, 0.0], [-torch.inf, -torch.inf], [0.1, 0.2]])
    planned = made(None).footprint()
    assert planned == made({"head_scores": HeadScores(scores, scores)}).footprint()
    token = 2 * D * 4  # K and V of one head
    dense, sliding = 2 * 1000 * token, 2 * 8 * token
    assert planned.device == dense + sliding + 1000 * token + (SINK + WINDOW) * token + 2 * D * 4
    assert planned.host == 0


@pytest.mark.parametrize(
    ("window", "part", "kept"), [(120, 0.2, 120), (99, 0.2, 100), (10, 0.203, 102), (9999, 0, 1000)]
)
def test_the_window_is_a_part_of_the_prompt_at_least(window, part, kept):
    method = made(None, {**SETTINGS, "window": window, "window_part": part})
    ((_, _), (_, local)) = method.retrieval[2].parts
    assert local.window == kept


def test_a_file_of_another_model_is_refused(heads_file):
    with pytest.raises(KvcliError, match=r"heads has shape \[3, 2\], not \[2, 2\]") as refused:
        new_method("razor", {"heads": heads_file([True, False], [True, False], [True, False])}, layers(), 50)
    assert refused.value.exit_code == ExitCode.USAGE


def test_more_echo_heads_than_heads_are_refused():
    with pytest.raises(ValidationError, match=r"echo 0.2 is more than sparsity 0.1"):
        get_method("razor").Config(sparsity=0.1, echo=0.2)


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
