"""What every method must hold to, driven by the listing: a new file in kvcli/methods is tested by being there."""

import sys

import pytest
import torch
from engine import run
from families import EAGER, FAMILIES, HEAD_DIM, HEADS, KV_HEADS, LAYERS, VOCAB, tiny_model

import kvcli.kernels.block_attention as kernels
from kvcli.kernels.softmax import Softmax
from kvcli.methods import get_method, method_names
from kvcli.methods.base import Method
from kvcli.profile import resolve_profile

PROMPT, STEPS = 75, 40
# Small enough that a context of 75 tokens outgrows it; each method takes the settings that it knows.
SMALL = {"budget": 48, "sink": 8, "window": 8, "page_size": 8, "dense_layers": 1, "prefill_window": 20}
SMALL |= {"chunk": 4, "rank": 12, "outliers": 2, "local": 1}
AMPLE = {**SMALL, "budget": 4096}
BUDGETED = [name for name in method_names() if "budget" in get_method(name).Config.model_fields]


def settings(name, wanted):
    fields = get_method(name).Config.model_fields
    return {key: value for key, value in wanted.items() if key in fields}


def prompt(seed, length=PROMPT):
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def tokens(model, name, wanted, prompts, steps=STEPS):
    return [sequence.token_ids for sequence in run(model, name, settings(name, wanted), prompts, steps)]


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    """A family's model, a prompt, and transformers' greedy continuation of it."""
    model = tiny_model(request.param)
    assert (model.config._attn_implementation == "eager") == (request.param in EAGER)
    ids = prompt(1)
    reference = model.generate(torch.tensor([ids]), max_new_tokens=STEPS, do_sample=False, eos_token_id=None)
    return model, ids, reference[0, PROMPT:].tolist()


@pytest.mark.parametrize("name", method_names())
def test_ample_budget_is_token_for_token_what_transformers_generates(family, name):
    model, ids, reference = family
    assert len(set(reference)) > STEPS / 3, "a reference that repeats itself tests little"
    assert tokens(model, name, {**AMPLE, **get_method(name).exact}, [ids]) == [reference]


@pytest.mark.parametrize("name", BUDGETED)
def test_small_budget_is_respected_and_used(llama, name, monkeypatch):
    seen = []  # keys attended to by each call of `attend`
    attend, block_attention = Method.attend, kernels.block_attention

    def watched(q, k, *rest, **more):
        if seen:
            seen[-1] += k.shape[1]
        return block_attention(q, k, *rest, **more)

    def begun(*arguments):
        seen.append(0)
        return attend(*arguments)

    for module in list(sys.modules.values()):
        if getattr(module, "block_attention", None) is block_attention:
            monkeypatch.setattr(module, "block_attention", watched)
    monkeypatch.setattr(Method, "attend", begun)
    (sequence,) = run(llama, name, settings(name, SMALL), [prompt(2)], STEPS)
    dense = sequence.method.config.leading_dense_layers
    assert dense < LAYERS
    by_layer = [seen[layer::LAYERS] for layer in range(LAYERS)]
    assert [attended[-1] for attended in by_layer[:dense]] == [PROMPT + STEPS - 1] * dense
    if sequence.method.budget_is_mean:
        by_layer[dense:] = [[sum(step) / len(step) for step in zip(*by_layer[dense:], strict=True)]]
    for attended in by_layer[dense:]:
        for step, count in enumerate(attended):
            assert count <= SMALL["budget"] + sequence.method.config.beside_budget(PROMPT, step + 1)
        assert min(attended) > SMALL["budget"] - SMALL["page_size"]


@pytest.mark.parametrize("name", method_names())
def test_same_input_same_tokens(llama, name):
    assert tokens(llama, name, SMALL, [prompt(3)]) == tokens(llama, name, SMALL, [prompt(3)])


@pytest.mark.parametrize("name", method_names())
def test_a_batch_of_different_lengths_is_the_runs_of_one(llama, name):
    prompts = [prompt(4), prompt(5, 31), prompt(6, 90)]
    assert tokens(llama, name, SMALL, prompts) == [tokens(llama, name, SMALL, [ids])[0] for ids in prompts]


@pytest.mark.parametrize("name", method_names())
def test_prompt_of_one_token_and_growth_past_the_budget(llama, name):
    (out,) = tokens(llama, name, SMALL, [[7]], steps=120)
    assert len(out) == 120


@pytest.mark.parametrize("name", method_names())
def test_fork_continues_like_the_original(llama, name):
    sequences = run(llama, name, settings(name, SMALL), [prompt(7)], 2)
    method = sequences[0].method
    fork = method.fork(method.context.counters, "fork")
    assert fork.footprint() == method.footprint()
    last = LAYERS - 1
    q, k, v = torch.randn(HEADS, HEAD_DIM), torch.randn(KV_HEADS, HEAD_DIM), torch.randn(KV_HEADS, HEAD_DIM)
    softmax = Softmax(0.25)
    first = method.attend(last, q, k, v, softmax)
    assert torch.equal(first, fork.attend(last, q, k, v, softmax))
    method.attend(last, q, 2 * k, v, softmax)
    assert fork.caches[last].length == method.caches[last].length - 1


@pytest.mark.parametrize("name", method_names())
def test_says_what_it_is_and_has_a_profile_of_its_name(name):
    method = get_method(name)
    assert method.title
    assert method.paper
    assert method.__doc__
    profile = resolve_profile(method=name)
    assert profile.method == name
    for key, field in method.Config.model_fields.items():
        assert field.description, f"{name}.{key} has no description"
