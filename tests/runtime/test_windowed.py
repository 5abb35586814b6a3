import pytest
import torch
from engine import in_memory, new_method, profile_of
from families import FAMILIES, LAYERS, VOCAB, tiny_model

from kvcli.conformance.crossed import crossed
from kvcli.kernels.prefill_attention import prefill_attention
from kvcli.models.geometry import geometry_of
from kvcli.runtime.attention_hook import attached
from kvcli.runtime.engine import engine
from kvcli.runtime.windowed import windowed_prefill


def prompt(length):
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def ample(model, window, capacity=120, **more):
    """A method that attends to everything, in windows."""
    settings = {"budget": 4096, "window": 2048, "prefill_window": window}
    return new_method("infllm", settings, geometry_of(model.config, model.dtype).layers, capacity, **more)


def read(model, ids, window, advance=lambda _: None):
    layers, method = geometry_of(model.config, model.dtype).layers, ample(model, window)
    with attached(model) as hook:
        return windowed_prefill(hook, ids, method, layers, advance, window), method


@pytest.mark.parametrize(("family", "window"), crossed(list(FAMILIES), [1, 16, 50, 51, 1000]))
def test_every_window_gives_what_transformers_gives(family, window):
    model, ids = tiny_model(family), prompt(51)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([ids])).logits[0, -1]
    logits, method = read(model, ids, window)
    assert torch.allclose(logits, expected, rtol=1e-4, atol=1e-4)
    assert {cache.length for cache in method.caches} == {51}


def test_progress_counts_tokens_of_each_layer():
    done = []
    read(tiny_model("llama"), prompt(51), 20, done.append)
    assert done == [20] * LAYERS + [20] * LAYERS + [11] * LAYERS


def test_methods_without_windows_are_read_exactly_and_together():
    model, ids = tiny_model("llama"), prompt(30)
    settings = {"budget": 4096, "window": 2048, "prefill_window": 8}
    with engine(in_memory(model), [30]) as ready:
        methods = [
            ready.method(profile_of(*each), ready.context(30, 0))
            for each in (("full", {}), ("infllm", settings), ("refreekv", {}))
        ]
        logits = ready.prefill(ids, methods)
    assert logits[0] is logits[2], "methods with exact prefill share one reading"
    assert torch.allclose(logits[0], logits[1], rtol=1e-4, atol=1e-4)
    assert {cache.length for method in methods for cache in method.caches} == {30}


@pytest.mark.parametrize(("asked", "length", "shown"), [(3, 40, 3), (30, 40, 16), (5, 4, 3), (5, 1, 0), (0, 40, 0)])
def test_a_preview_shows_what_it_attends_with_behind_the_first_token_and_leaves_no_trace(asked, length, shown):
    model, ids, asked = tiny_model("llama"), prompt(length), prompt(60)[:asked]
    layers, seen = geometry_of(model.config, model.dtype).layers, {}
    method = ample(model, 16)
    plain = read(model, ids, 16)[0]

    class Curious(type(method)):
        preview = asked

        def take_preview(self, layer, q, k, v, softmax):
            assert self.caches[layer].length == 0
            seen[layer] = (q, k, v)

    method.__class__ = Curious
    with attached(model) as hook:
        logits = windowed_prefill(hook, ids, method, layers, lambda _: None, 16)
    assert torch.equal(logits, plain)
    assert set(seen) == (set(range(LAYERS)) if shown else set())
    if not shown:
        return
    handed = []

    def attend(layer, q, k, v, softmax):
        handed.append((q[0], k[0], v[0]))
        return prefill_attention(q[0], k[0], v[0], softmax).transpose(0, 1)[None]

    with attached(model) as hook, torch.inference_mode():
        hook.run(attend, torch.tensor([[ids[0], *asked[-shown:]]]), torch.arange(shown + 1)[None])
    for layer in range(LAYERS):
        for mine, expected in zip(seen[layer], handed[layer], strict=True):
            assert torch.allclose(mine, expected, atol=1e-5)
