import pytest
import torch
from families import FAMILIES, VOCAB, tiny_model
from transformers import AttentionInterface

from kvcli.kernels.softmax import Softmax
from kvcli.models.geometry import attention_modules
from kvcli.runtime import attention_hook
from kvcli.runtime.attention_hook import attached
from kvcli.runtime.decode import BlockingPipeline


def logits(model):
    ids = torch.randint(3, VOCAB, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_detached_model_is_as_it_was(family):
    model = tiny_model(family)
    before, implementation = logits(model), model.config._attn_implementation
    with attached(model):
        assert model.config._attn_implementation == "kvcli"
    assert model.config._attn_implementation == implementation
    assert not any(hasattr(module, "kvcli_hook") for module in model.modules())
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_handler_sees_every_layer_in_order_unrepeated_and_unmasked(family):
    model = tiny_model(family)
    seen = []

    def handler(layer, q, k, v, softmax):
        seen.append(layer)
        assert k.shape == v.shape
        assert q.shape[1] % k.shape[1] == 0
        assert k.shape[1] < q.shape[1]
        assert softmax.scale > 0
        return q.transpose(1, 2)

    with attached(model) as hook, torch.inference_mode():
        hook.run(handler, torch.tensor([[5, 6, 7]]), torch.tensor([[0, 1, 2]]))
    assert seen == list(range(len(attention_modules(model))))


def test_two_models_are_attached_apart():
    first, second = tiny_model("llama"), tiny_model("qwen3")
    calls = []
    with attached(first) as one, attached(second) as two, torch.inference_mode():
        token, position = torch.tensor([[5]]), torch.tensor([[0]])
        one.run(lambda layer, q, k, v, softmax: calls.append("first") or q.transpose(1, 2), token, position)
        two.run(lambda layer, q, k, v, softmax: calls.append("second") or q.transpose(1, 2), token, position)
    assert calls == ["first"] * 4 + ["second"] * 4


def test_an_exception_detaches():
    model = tiny_model("llama")
    with pytest.raises(RuntimeError, match="half way"), attached(model):
        raise RuntimeError("half way")
    assert model.config._attn_implementation != "kvcli"


def test_blocking_pipeline_keeps_rows_apart():
    class Echo:
        def __init__(self, factor):
            self.factor = factor

        def attend(self, layer, q, k, v, softmax):
            assert (q.shape, k.shape, v.shape) == ((4, 8), (2, 8), (2, 8))
            return q * self.factor

    q, k = torch.randn(3, 4, 1, 8), torch.randn(3, 2, 1, 8)
    out = BlockingPipeline([Echo(1), Echo(2), Echo(3)])(0, q, k, k, Softmax(1.0))
    assert out.shape == (3, 1, 4, 8)
    assert torch.equal(out[2, 0], q[2, :, 0] * 3)


def test_values_narrower_than_keys_are_padded_and_cut():
    model = tiny_model("mimo_v2_flash")
    seen = []

    def handler(layer, q, k, v, softmax):
        seen.append((k.shape[-1], v.shape[-1], bool(v[..., 16:].any())))
        return q.transpose(1, 2)  # neither contiguous nor as narrow as the values

    with attached(model) as hook, torch.inference_mode():
        hook.run(handler, torch.tensor([[5, 6, 7]]), torch.tensor([[0, 1, 2]]))
    assert seen == [(24, 24, False)] * 4


def test_modules_that_view_the_output_get_it_contiguous():
    """As those of afmoe do."""
    model, contiguous = tiny_model("llama"), []

    def seen(module, query, *args, **kwargs):
        out, _ = attention_hook._attention(module, query, *args, **kwargs)
        contiguous.append(out.is_contiguous())
        return out, None

    AttentionInterface.register("kvcli", seen)
    try:
        with attached(model) as hook, torch.inference_mode():
            hook.run(lambda layer, q, k, v, softmax: _by_channel(q), torch.tensor([[5, 6]]), torch.tensor([[0, 1]]))
    finally:
        AttentionInterface.register("kvcli", attention_hook._attention)
    assert contiguous == [True] * 4


def _by_channel(q):
    """Queries [b, H, n, d] as an output [b, n, H, d] whose channels do not lie side by side."""
    return q.transpose(1, 2).mT.contiguous().mT
