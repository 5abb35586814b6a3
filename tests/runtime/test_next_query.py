"""Queries made a layer ahead: they are the model's own, and a model whose are not is refused."""

import pytest
import torch
from engine import new_method, run
from families import FAMILIES, tiny_model

from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.profiles import resolve_profile
from kvcli.methods.full import Full
from kvcli.models.geometry import attention_modules, geometry_of
from kvcli.models.loading import Model
from kvcli.models.rope import installed
from kvcli.runtime.attention_hook import attached
from kvcli.runtime.engine import engine
from kvcli.runtime.next_query import check_next_queries, next_queries

CAPACITY = 50


class Told(Full):
    """Full attention that writes down what it is told."""

    wants_next_query = True

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.told = {}

    def take_next_query(self, layer, q):
        self.told[layer] = q


def told(model, rotary):
    method = new_method("full", {}, geometry_of(model.config, model.dtype).layers, CAPACITY, model.dtype, rotary)
    method.__class__ = Told
    method.told = {}
    return method


def check(model):
    with attached(model) as hook, installed(model, [CAPACITY]) as rope:
        check_next_queries(hook, rope, told(model, rope.rotary(CAPACITY)))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_projection_is_the_models_own(family):
    model = tiny_model(family)
    check(model)
    assert not any(module._forward_pre_hooks for module in attention_modules(model))


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_sixteen_bit_models_pass(family):
    check(tiny_model(family).bfloat16())


@pytest.mark.parametrize("layer", [0, 2])
def test_a_query_that_comes_out_different_is_refused(layer):
    model = tiny_model("llama")
    attention_modules(model)[layer].q_norm = torch.nn.RMSNorm(16)  # which the model does not use
    with pytest.raises(KvcliError, match=f"'llama'.*layer {layer} comes out .*% off") as refused:
        check(model)
    assert refused.value.exit_code == ExitCode.USAGE
    assert "freekv" in refused.value.hint


def test_an_attention_without_a_known_projection_is_refused():
    model = tiny_model("llama")
    module = attention_modules(model)[1]
    module.wq = module.q_proj
    del module.q_proj
    with pytest.raises(KvcliError, match="layer 1 has no known query projection"):
        check(model)


def test_the_engine_refuses_before_anything_is_read():
    module = tiny_model("llama")
    geometry = geometry_of(module.config, torch.float32)
    model = Model(module, None, geometry, torch.device("cpu"), torch.float32, "tiny", "dummy")
    with engine(model, [CAPACITY]) as ready:
        profile, context = resolve_profile("infinigen"), ready.context(CAPACITY - 9, 9)
        assert ready.method(profile, context).wants_next_query
        attention_modules(module)[2].q_norm = torch.nn.RMSNorm(16)
        with pytest.raises(KvcliError, match="layer 2"):
            ready.method(profile, context)
        ready.method(resolve_profile("freekv"), context)


@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3", "gemma2", "gemma3", "gpt_oss"])
def test_each_retrieving_layer_is_told_what_it_makes_of_the_input_of_the_layer_before(family):
    model, position = tiny_model(family), 17
    modules = attention_modules(model)
    inputs, queries = {}, {}
    with attached(model) as hook, installed(model, [CAPACITY]) as rope, torch.inference_mode():
        method = told(model, rope.rotary(CAPACITY))
        for cache in method.caches:
            cache.length = position
        heads = [
            module.register_forward_pre_hook(
                lambda module, args, kwargs: inputs.update({module.layer_idx: kwargs}), with_kwargs=True
            )
            for module in modules
        ]

        def attend(layer, q, k, v, softmax):
            return queries.update({layer: q[0, :, 0]}) or q.transpose(1, 2)

        with next_queries(hook, [method]):
            hook.run(attend, torch.tensor([[7]]), torch.tensor([[position]]))
        for head in heads:
            head.remove()
        steps, queries = dict(inputs), {}
        hook.handler = attend
        for layer, module in enumerate(modules[1:], 1):  # the layer itself, run on what the one before got
            module(**{**steps[layer], "hidden_states": steps[layer - 1]["hidden_states"]})
    assert sorted(method.told) == [layer for layer in sorted(method.retrieval) if layer > 0]
    for layer, query in method.told.items():
        assert torch.allclose(query, queries[layer], rtol=1e-4, atol=1e-5), f"layer {layer}"


def test_rows_of_a_batch_are_told_apart_and_others_nothing():
    model = tiny_model("llama")
    with attached(model) as hook, installed(model, [CAPACITY]) as rope, torch.inference_mode():
        methods = [told(model, rope.rotary(CAPACITY)) for _ in range(3)]
        methods[1].wants_next_query = False
        for length, method in enumerate(methods, 5):
            for cache in method.caches:
                cache.length = length

        def attend(layer, q, k, v, softmax):
            return q.transpose(1, 2)

        positions = torch.tensor([[5], [6], [7]])
        with next_queries(hook, methods):
            hook.run(attend, torch.tensor([[7], [8], [9]]), positions)
        together = [dict(method.told) for method in methods]
        assert together[1] == {}
        for row in (0, 2):
            methods[row].told.clear()
            with next_queries(hook, [methods[row]]):
                hook.run(attend, torch.tensor([[7 + row]]), positions[row : row + 1])
            for layer, query in methods[row].told.items():
                assert torch.allclose(query, together[row][layer], atol=1e-5)


def test_a_run_without_takers_leaves_the_modules_alone(monkeypatch):
    model = tiny_model("llama")
    monkeypatch.setattr(
        torch.nn.Module, "register_forward_pre_hook", lambda *_, **__: pytest.fail("a hook that nobody wants")
    )
    run(model, "full", {}, [[5, 6, 7]], 3)
