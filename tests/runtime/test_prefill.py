import pytest
import torch
from engine import new_method
from families import FAMILIES, VOCAB, tiny_model

from kvcli.conformance.crossed import crossed
from kvcli.models.geometry import geometry_of
from kvcli.runtime.attention_hook import attached
from kvcli.runtime.prefill import prefill


def read(model, ids, chunk, advance=lambda _: None):
    layers = geometry_of(model.config, model.dtype).layers
    method = new_method("full", {}, layers, len(ids))
    with attached(model) as hook:
        return prefill(hook, ids, method, layers, advance, chunk), method


def prompt(length):
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@pytest.mark.parametrize(("family", "chunk"), crossed(list(FAMILIES), [1, 16, 50, 51, 1000]))
def test_every_chunk_size_gives_what_transformers_gives(family, chunk):
    model, ids = tiny_model(family), prompt(51)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([ids]), use_cache=True)
    logits, method = read(model, ids, chunk)
    assert torch.allclose(logits, expected.logits[0, -1], rtol=1e-4, atol=1e-4)
    for cache, layer in zip(method.caches, expected.past_key_values.layers, strict=True):
        if layer.keys.shape[2] == len(ids):  # transformers cuts sliding layers to their window too
            assert torch.allclose(cache.k[:, :51], layer.keys[0], rtol=1e-4, atol=1e-4)
            assert torch.allclose(cache.v[:, :51], layer.values[0], rtol=1e-4, atol=1e-4)
        assert cache.length == 51


def test_progress_counts_tokens_times_layers():
    done = []
    read(tiny_model("llama"), prompt(51), 20, done.append)
    assert done == [20, 20, 11] * 4


def test_one_token():
    model = tiny_model("llama")
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([[9]])).logits[0, -1]
    assert torch.allclose(read(model, [9], 8)[0], expected, rtol=1e-4, atol=1e-5)


def test_layers_get_their_forward_back_even_after_an_interrupt():
    model = tiny_model("llama")

    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read(model, prompt(30), 8, interrupt)
    assert not any("forward" in vars(layer) for layer in model.model.layers)


def test_a_full_length_tensor_lives_only_in_hidden_states_and_kv():
    """Every linear layer of a chunked prefill sees at most a chunk of tokens, and the head one token."""
    model = tiny_model("llama")
    longest = {}

    def note(module, inputs):
        longest[module] = max(longest.get(module, 0), inputs[0].shape[-2])

    hooks = [m.register_forward_pre_hook(note) for m in model.modules() if isinstance(m, torch.nn.Linear)]
    read(model, prompt(90), 16)
    for hook in hooks:
        hook.remove()
    assert longest[model.lm_head] == 1
    assert {longest[m] for m in longest if m is not model.lm_head} == {16}


@pytest.mark.parametrize("rows", [1, 5, 20, 80])
def test_queries_are_shown_and_the_last_handed_over_whatever_the_chunks(rows):
    model = tiny_model("llama")
    layers = geometry_of(model.config, model.dtype).layers

    class Wants:
        def __init__(self):
            self.query_rows, self.queries, self.observed = rows, {}, {}

        def observe(self, layer, q, k, softmax):
            self.observed.setdefault(layer, []).append((q.clone(), k.clone()))

        def prefill(self, layer, k, v, q, softmax):
            self.queries[layer] = q.clone()
            assert softmax.scale == 0.25

    taken = []
    with attached(model) as hook:
        for chunk in (7, 1000):
            taken.append(Wants())
            prefill(hook, prompt(51), taken[-1], layers, lambda _: None, chunk)
    for layer in range(4):
        small, whole = (wants.queries[layer] for wants in taken)
        assert small.shape == (4, min(rows, 51), 16)
        assert torch.allclose(small, whole, rtol=1e-4, atol=1e-5)
        parts, ((q, k),) = (wants.observed[layer] for wants in taken)
        assert [keys.shape[1] for _, keys in parts] == [7, 14, 21, 28, 35, 42, 49, 51]
        assert torch.allclose(torch.cat([queries for queries, _ in parts], 1), q, rtol=1e-4, atol=1e-5)
        assert torch.allclose(parts[-1][1], k, rtol=1e-4, atol=1e-5)
        assert torch.equal(q[:, -rows:], whole)
