"""A prompt's KV that is taken while the prompt is read: what comes of it is what comes of handing it over at once."""

import pytest
import torch
from engine import new_method
from families import tiny_model
from stated import HK, D, H, settings

from kvcli.kernels.softmax import Softmax
from kvcli.methods import get_method, method_names
from kvcli.models.geometry import LayerGeometry, geometry_of
from kvcli.runtime.attention_hook import attached
from kvcli.runtime.prefill import Branches, prefill_branches

LENGTH, STEPS, LAYERS = 131, 4, 2
SOFTMAX = Softmax(D**-0.5)
# Those whose KV leaves the device by parts.
LEAVING = {"arkvale", "freekv", "offload"}


def forms():
    for name in method_names():
        if get_method(name).needs(get_method(name).Config(**settings(name))) or name in ("actqkv", "infllm"):
            continue  # heads are probed on a model; read by windows
        fields = get_method(name).Config.model_fields
        yield name, settings(name)
        if "kv_dtype" in fields:
            yield name, settings(name, kv_dtype="int8", **({"offload": True} if "offload" in fields else {}))


def outcome(name, wanted, cuts):
    """What a prompt comes to, taken up to each of `cuts` before it is handed over: outputs of steps, and counters."""
    layers = [LayerGeometry(index, H, HK, D, None, True) for index in range(LAYERS)]
    method = new_method(name, wanted, layers, LENGTH + STEPS, prompt_tokens=LENGTH)
    counters = method.context.counters
    generator = torch.Generator().manual_seed(0)
    parts, out = [], []
    for layer in range(LAYERS):
        k, v = torch.randn(2, HK, LENGTH, D, generator=generator)
        q = torch.randn(H, LENGTH, D, generator=generator)
        method.observe(layer, q, k, SOFTMAX)
        for part in method.repeated:
            method.observe_repeated(layer, part, q[:, part], k, SOFTMAX)
        for cut in cuts:
            method.take_part(layer, k[:, :cut].clone(), v[:, :cut].clone())
        parts.append(counters.prefill_bytes_to_host)
        method.prefill(layer, k, v, q[:, LENGTH - min(LENGTH, method.query_rows) :], SOFTMAX)
    for _ in range(STEPS):
        counters.next_step()
        for layer in range(LAYERS):
            q, k, v = (torch.randn(heads, D, generator=generator) for heads in (H, HK, HK))
            if method.wants_next_query and layer:
                method.take_next_query(layer, q)
            out.append(method.attend(layer, q, k, v, SOFTMAX))
    return torch.stack(out), (counters.prefill_bytes_to_host, counters.counts), parts


@pytest.mark.parametrize(("name", "wanted"), list(forms()), ids=lambda value: value if isinstance(value, str) else "")
def test_taken_in_parts_or_at_once(name, wanted):
    expected, counts, _ = outcome(name, wanted, [])
    found, found_counts, parts = outcome(name, wanted, [1, 40, 64, 129])
    assert torch.equal(found, expected)
    assert found_counts == counts
    assert (parts[-1] > 0) >= (name in LEAVING)


@pytest.mark.parametrize("name", sorted(LEAVING))
def test_all_but_the_last_chunk_has_left_when_a_layer_ends(name):
    """In a prefill, that of questions on one document too: what is common once, by the first of them."""
    model, branches = tiny_model("llama"), Branches(list(range(3, 83)), [[5] * 9, [6] * 30])
    layers = geometry_of(model.config, model.dtype).layers
    wanted = settings(name, **({"page_size": 8} if name != "offload" else {}))
    read = []
    for chunk in (16, 1000):
        methods = [new_method(name, wanted, layers, 120) for _ in branches.rests]
        for method in methods[1:]:
            method.share(methods[0], 80)
        with attached(model) as hook:
            prefill_branches(hook, branches, methods, layers, lambda _: None, chunk)
        read.append(methods)
    for many, one in zip(*read, strict=True):
        assert many.footprint() == one.footprint()
        assert many.context.counters.prefill_bytes_to_host == one.context.counters.prefill_bytes_to_host
        q, k, v = torch.randn(4, 16), *torch.randn(2, 2, 16)
        softmax = Softmax(0.25)
        for layer in range(len(layers)):
            assert torch.allclose(
                many.attend(layer, q, k, v, softmax), one.attend(layer, q, k, v, softmax), rtol=1e-4, atol=1e-5
            )
