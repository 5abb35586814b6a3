"""Every private interface that is used, tried: a release of torch or transformers that moves one fails here."""

import torch
from families import tiny_config, tiny_model
from torch.nn.attention import SDPBackend
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from kvcli import compat


def test_onednn_multiplies_what_it_says_it_can():
    x, bias = torch.randn(3, 5), torch.randn(7)
    assert compat.onednn_suits(torch.randn(7, 5)) == torch.backends.mkldnn.is_available()
    assert not compat.onednn_suits(torch.randn(7, 5).half())
    for dtype, error in ((torch.float32, 1e-5), (torch.bfloat16, 1e-1)):
        weight = torch.randn(7, 5).to(dtype)
        if compat.onednn_suits(weight):
            out = compat.onednn_linear(x.to(dtype), weight, bias.to(dtype))
            assert torch.allclose(out.float(), x @ weight.float().T + bias, atol=error)


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


def test_modules_of_experts_are_told_from_others():
    found = {type(module).__name__ for module in tiny_model("qwen3_moe").modules() if compat.is_routed(module)}
    assert found == {"Qwen3MoeExperts"}
