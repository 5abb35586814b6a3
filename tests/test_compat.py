"""Every private interface that is used, tried: a release of torch or transformers that moves one fails here."""

import pytest
import torch
from families import tiny_config, tiny_model
from torch import nn
from torch.nn.attention import SDPBackend
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from kvcli import compat


class Layer(nn.Module):
    """A layer of ours: torch's own are not compiled by themselves."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).relu()


def test_onednn_multiplies_what_it_says_it_can():
    x, bias = torch.randn(3, 5), torch.randn(7)
    assert compat.onednn_suits(torch.randn(7, 5)) == torch.backends.mkldnn.is_available()
    assert not compat.onednn_suits(torch.randn(7, 5).half())
    for dtype, error in ((torch.float32, 1e-5), (torch.bfloat16, 1e-1)):
        weight = torch.randn(7, 5).to(dtype)
        if compat.onednn_suits(weight):
            out = compat.onednn_linear(x.to(dtype), weight, bias.to(dtype))
            assert torch.allclose(out.float(), x @ weight.float().T + bias, atol=error)


def test_modules_are_compiled_and_as_before_afterwards():
    calls = []

    def backend(graph, _):
        calls.append(graph)
        return graph.forward

    layer, x = Layer(), torch.randn(2, 4)
    with compat.compiled([layer], backend, recompile_limit=3), torch.inference_mode():
        found = layer(x)
        assert torch._dynamo.config.recompile_limit == 3
    assert len(calls) == 1
    assert torch.equal(found, layer(x))
    assert layer._compiled_call_impl is None


def test_what_a_compiler_raises_is_known():
    def backend(*_):
        raise ValueError("no such instruction")

    layer = Layer()
    with compat.compiled([layer], backend, 3), pytest.raises(compat.CompilationError):
        layer(torch.randn(2, 4))


def test_torch_says_which_attention_it_would_take():
    q, kv = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 5, 8)
    assert compat.preferred_attention(q, kv, kv, 0.3, False, True) in set(SDPBackend.__members__.values())


def test_a_models_attention_is_told_and_can_be_set():
    model = tiny_model("llama")
    assert compat.can_set_attention(model)
    before = compat.attention_implementation(model)
    model.set_attn_implementation("eager")
    assert compat.attention_implementation(model) == "eager" != before


def test_an_auto_class_makes_models_of_another_class():
    config = tiny_config("llama")
    own = type("Own", (LlamaForCausalLM,), {"__module__": LlamaForCausalLM.__module__})
    with torch.device("meta"):
        assert type(compat.auto_class(AutoModelForCausalLM, type(config), own).from_config(config)) is own
        assert type(AutoModelForCausalLM.from_config(config)) is LlamaForCausalLM
