"""A model's layers in few kernels: the same logits, every module as it was afterwards, and so many launches a layer."""

from collections import Counter

import pytest
import torch
from fake_cuda import NOTHING
from families import FAMILIES, HYBRIDS, VOCAB, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from kvcli.kernels import _triton
from kvcli.kernels import norm_rope as add_rms_norm
from kvcli.kernels import norm_rope as rms_norm
from kvcli.kernels import norm_rope as rotate
from kvcli.kernels import norm_rope as silu_mul
from kvcli.runtime.attention_hook import attached
from kvcli.runtime.fused import parts_of
from kvcli.runtime.gpu.fused import fused_layers, sums_in_norms
from kvcli.runtime.layer_major import layer_major

TOKENS = torch.randint(3, VOCAB, (2, 3), generator=torch.Generator().manual_seed(5))
# Norm, product of queries, keys and values, rotation; product of what attention gave, residual with norm, product of
# gate and up, gate, product, residual.
LAYER = 9


def logits(model):
    with torch.inference_mode():
        return model(TOKENS, use_cache=False).logits


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS, "kimi_linear"])
def test_logits_are_the_same_and_modules_come_back(family):
    model = tiny_model(family)
    expected = logits(model)
    with fused_layers(model):
        changed = [module for module in model.modules() if "forward" in vars(module)]
        found = logits(model)
    assert changed
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-6)
    assert not any("forward" in vars(module) for module in changed)


def test_logits_are_the_same_by_kernels(monkeypatch):
    model = tiny_model("llama")
    expected = logits(model)
    with fused_layers(model):
        monkeypatch.setattr(_triton, "on_cpu", True)
        torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)


def test_a_prompt_that_is_read_between_steps_leaves_layers_as_they_were():
    """Steps of other sequences run by the same layers, whose forward a prompt replaces for itself."""
    model, tokens = tiny_model("llama"), TOKENS[:1]
    layers = list(model.model.layers)
    seen = []
    with attached(model) as hook, fused_layers(model), torch.inference_mode():
        own = [vars(layer)["forward"] for layer in layers]

        def step(_):
            seen.append([vars(layer)["forward"] for layer in layers] == own)

        parts = [[slice(0, 2), slice(2, 3)]] * len(layers)
        with layer_major(hook, parts, [2], step):
            hook.run(nothing, tokens, torch.arange(3)[None])
        assert seen == [True] * 2 * len(layers)
        assert [vars(layer)["forward"] for layer in layers] == own


@pytest.mark.parametrize(
    ("family", "found"), [("llama", True), ("qwen3", True), ("gemma2", False), ("glm4", False), ("granite", False)]
)
def test_layers_that_add_and_normalise_are_known_by_what_they_do(family, found):
    model = tiny_model(family)
    with sums_in_norms(model):
        assert {"forward" in vars(layer) for layer in model.model.layers} == {found}


def test_a_layer_with_a_factor_of_its_own_or_that_hands_less_on_stays_as_it_is(monkeypatch):
    layer = tiny_model("llama").model.layers[0]
    assert parts_of(layer) is not None
    forward = type(layer).forward
    for other in (
        lambda self, hidden_states, **given: 0.5 * forward(self, hidden_states, **given),
        lambda self, hidden_states, position_ids=None, **given: forward(self, hidden_states, **given),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(type(layer), "forward", other)
            assert parts_of(layer) is None


def test_weights_are_not_kept_twice():
    model = tiny_model("qwen2")  # whose projections have biases
    with fused_layers(model):
        for layer in model.model.layers:
            parts = [layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight]
            assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
            assert parts[0].untyped_storage().nbytes() == sum(part.nbytes for part in parts)


class Launches(TorchDispatchMode):
    """Counts what would be kernels on a GPU."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and func.overloadpacket.__name__ not in NOTHING:
            self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def nothing(layer, q, k, v, softmax):
    """Attention that launches nothing."""
    return torch.empty_like(q.transpose(1, 2))


def noted(launched):
    return lambda kernel, *_, **__: launched.append(kernel.__name__)


def test_kernels_of_a_layer(monkeypatch):
    counts = []
    for layers in (2, 3):
        model, launched = tiny_model("llama", layers=layers), []
        with attached(model) as hook, fused_layers(model), Launches() as counter, monkeypatch.context() as patch:
            for module in (add_rms_norm, rms_norm, rotate, silu_mul):
                patch.setattr(module, "launch", noted(launched))
            patch.setattr(_triton, "on_cpu", True)
            with torch.inference_mode():
                hook.run(nothing, TOKENS[:, :1], torch.zeros(2, 1, dtype=torch.int64))
        counts.append(counter.names + Counter(launched))
    of_a_layer = counts[1] - counts[0]
    assert of_a_layer.total() == LAYER, of_a_layer
