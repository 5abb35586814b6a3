"""A model's layers by loops for a few rows: the same logits, prompts by the model's own code, nothing left behind."""

import pytest
import torch
from families import FAMILIES, VOCAB, tiny_model
from gguf import GGMLQuantizationType, quants

from kvcli.kernels import _numba, gemv, packed_linear
from kvcli.kernels.packed_linear import PACKINGS, PackedWeight
from kvcli.runtime import cpu_layers as layers
from kvcli.runtime.cpu_layers import cpu_layers
from kvcli.runtime.linear import cpu_linears

pytestmark = pytest.mark.skipif(_numba.numba is None, reason="numba is not there")

TOKENS = torch.randint(3, VOCAB, (2, 3), generator=torch.Generator().manual_seed(5))


@pytest.fixture(autouse=True)
def nothing_is_too_small(monkeypatch):
    monkeypatch.setattr(_numba, "LEAST", 1)


def logits(model, tokens=TOKENS):
    with torch.inference_mode():
        return model(tokens, use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_same_and_modules_come_back(family):
    model = tiny_model(family)
    expected = logits(model)
    with cpu_layers(model):
        changed = [module for module in model.modules() if "forward" in vars(module)]
        found = logits(model)
    assert changed
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(logits(model), expected)
    assert not any("forward" in vars(module) for module in changed)


def launches(depth, monkeypatch):
    launched, run = [], gemv.run

    def noted(loop, *arguments):
        launched.append(loop)
        run(loop, *arguments)

    model = tiny_model("llama", layers=depth)
    with cpu_layers(model), monkeypatch.context() as patch:
        patch.setattr(gemv, "run", noted)
        logits(model, TOKENS[:1, :1])
    return len(launched)


def test_launches_of_a_layer(monkeypatch):
    """Queries, keys and values; what attention gave; gate and up; down."""
    assert launches(3, monkeypatch) - launches(2, monkeypatch) == 4


def test_prompts_go_through_the_models_own_code(monkeypatch):
    model, long = tiny_model("qwen2"), TOKENS.repeat(2, 20)  # whose projections have biases
    with cpu_linears(model):
        expected = logits(model, long)
    monkeypatch.setattr(layers, "MOST", long.numel())  # fewer than the numbers of any activation
    with cpu_layers(model):
        assert torch.equal(logits(model, long), expected)


def test_what_a_compiler_reads_is_the_models_own_code(monkeypatch):
    model = tiny_model("llama")
    expected = logits(model)
    with cpu_layers(model):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        monkeypatch.setattr(gemv, "run", None)
        torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-6)


def test_small_models_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(_numba, "LEAST", 1 << 40)
    model = tiny_model("llama")
    with cpu_layers(model):
        assert "forward" not in vars(model.model.layers[0].mlp)


@pytest.mark.parametrize("kinds", [("Q8_0",) * 4, ("Q8_0", "F16", "Q8_0", "Q8_0"), ("F16", "Q8_0", "F16", "BF16")])
def test_packed_weights_are_read_as_they_are(kinds, monkeypatch):
    """Whether or not queries, keys and values, or gate and up, have one format."""
    model = tiny_model("llama")
    formats = dict(zip(("q_proj", "v_proj", "gate_proj", "down_proj"), kinds, strict=True))
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in name:
            packing = PACKINGS[formats.get(name.rpartition(".")[2], "Q8_0")]
            rows = quants.quantize(module.weight.detach().numpy(), GGMLQuantizationType[packing.name])
            packed = torch.from_numpy(rows.view("uint8").reshape(module.out_features, -1).copy())
            module.weight = torch.nn.Parameter(PackedWeight(packed, packing, torch.float32), requires_grad=False)
    expected = logits(model)
    with cpu_layers(model), monkeypatch.context() as patch:
        patch.setattr(packed_linear, "unpack_rows", None)
        found = logits(model)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
