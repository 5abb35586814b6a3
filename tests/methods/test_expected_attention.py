"""Expected Attention against a slow re-derivation from the paper, in float64, sharing no code with it."""

import math

import pytest
import torch
from driver import HK, D, Stream
from eviction_oracle import G, Oracle, best
from families import tiny_model

from kvcli.errors import KvcliError
from kvcli.inputs.profiles import resolve_profile
from kvcli.models.rope import installed

STEPS, PROMPT = 4, 75
SETTINGS = {"budget": 24, "sink": 3, "window": 5, "future": 40}
DEFAULTS = {"epsilon": 0.01, "covariance": True, "value_norm": True}


def rotation(position):
    """The matrix [D, D] that turns a query to a position: channel i with channel i + D/2 (RoFormer, section 3.2)."""
    matrix, half = torch.zeros(D, D, dtype=torch.float64), D // 2
    for i in range(half):
        angle = position * 10000 ** (-2 * i / D)
        matrix[i, i] = matrix[i + half, i + half] = math.cos(angle)
        matrix[i + half, i] = math.sin(angle)
        matrix[i, i + half] = -math.sin(angle)
    return matrix


def no_rotation(_):
    return torch.eye(D, dtype=torch.float64)


def chosen(stream, head, document, turn, budget, sink, window, future, epsilon, covariance, value_norm):
    """The tokens of the prompt that a KV head keeps; what is behind the `document` stays, up to half of the budget."""
    prompt = stream.prompt
    last = prompt - max(window, min(prompt - document, budget // 2))
    expected = dict.fromkeys(range(sink, last), 0.0)
    for query_head in range(head * G, head * G + G):
        queries = [turn(-at) @ stream.prompt_q[query_head, at].double() for at in range(sink, document)]
        mu = sum(queries) / len(queries)
        sigma = sum(torch.outer(q - mu, q - mu) for q in queries) / len(queries)
        r = sum(turn(document + ahead) for ahead in range(future)) / future
        mu, sigma = r @ mu, r @ sigma @ r.T * covariance
        keys = {at: stream.k[head, at].double() for at in expected}
        z = {at: math.exp(mu @ k / math.sqrt(D) + k @ sigma @ k / (2 * D)) for at, k in keys.items()}
        for at in expected:
            expected[at] += z[at] / sum(z.values()) / G
    worth = {
        at: (a + epsilon) * (float(stream.v[head, at].double().norm()) if value_norm else 1)
        for at, a in expected.items()
    }
    return [*range(sink), *best(worth, budget - sink - (prompt - last)), *range(last, prompt)]


@pytest.fixture(scope="module")
def rotary():
    with installed(tiny_model("llama"), [PROMPT + STEPS]) as rope:
        return rope.rotary(PROMPT + STEPS)[:2]


@pytest.mark.parametrize(
    ("document", "changed"),
    [
        (PROMPT, {}),
        (PROMPT, {"covariance": False, "value_norm": False}),
        (PROMPT, {"epsilon": 0.05, "future": 1, "sink": 0, "window": 0}),
        (66, {}),
        (40, {"value_norm": False}),
    ],
    ids=str,
)
@pytest.mark.parametrize("rotates", [True, False])
def test_every_step_matches_the_oracle(document, changed, rotates, rotary):
    stream, settings = Stream(PROMPT, STEPS, seed=document), {**SETTINGS, **changed}
    stream.prompt_q += torch.linspace(-1, 1, D)  # queries have a mean
    turn, known = (rotation, rotary) if rotates else (no_rotation, [None, None])
    kept = [chosen(stream, head, document, turn, **{**DEFAULTS, **settings}) for head in range(HK)]
    oracle = Oracle(stream)
    for step, method, out in stream.run("expected_attention", settings, rotary=known, document_tokens=document):
        oracle.check(step, method, out, [[*mine, *range(PROMPT, PROMPT + step + 1)] for mine in kept])
    assert method.statistics() == {"kept_tokens": [24]}
    assert kept[0] != kept[1], "KV heads choose for themselves"
    assert not method.moments, "what the cut needed is gone"


def test_what_is_kept_of_a_document_does_not_depend_on_the_question(rotary):
    kept = []
    for seed in (1, 2):
        stream, other = Stream(PROMPT, 1, seed=0), Stream(PROMPT, 1, seed=seed)
        stream.prompt_q[:, 66:], stream.k[:, 66:] = other.prompt_q[:, 66:], other.k[:, 66:]
        ((_, method, _),) = stream.run("expected_attention", SETTINGS, rotary=rotary, document_tokens=66)
        kept.append(method.attended(1)[:, :66])
    assert torch.equal(*kept)
    assert kept[0].sum() == HK * (24 - 9)


@pytest.mark.parametrize("prompt", [24, 3, 1])
def test_a_prompt_within_the_budget_is_kept(prompt):
    stream = Stream(prompt, 2, seed=prompt)
    for step, method, out in stream.run("expected_attention", SETTINGS):
        Oracle(stream).check(step, method, out, [list(range(prompt + step + 1))] * HK)


@pytest.mark.parametrize(
    "wrong", [{"budget": 36, "sink": 4, "window": 32}, {"budget": 60, "sink": 30, "window": 0}, {"future": 0}]
)
def test_senseless_settings_are_refused(wrong):
    with pytest.raises(KvcliError):
        resolve_profile(method="expected_attention", overrides=wrong)
