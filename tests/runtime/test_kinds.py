"""Models of every kind beside the families: whatever keeps their KV, what comes out is what transformers generates."""

import pytest
import torch

from kvcli.conformance.crossed import crossed
from kvcli.conformance.models import HYBRIDS, KINDS, WINDOW, tiny_model
from kvcli.conformance.runs import in_memory, run
from kvcli.conformance.test_method import AMPLE, SMALL, prompt, settings
from kvcli.methods import get_method, method_names
from kvcli.models.geometry import LayerGeometry, attention_modules, geometry_of_model
from kvcli.runtime.engine import engine
from kvcli.runtime.sampling import Sampling

STEPS = 12
TEXT = 78  # two pages are filled
FEWER = 9  # of runs that are compared with each other: each sequence fills a page


ALL = [*KINDS, *HYBRIDS]
SIXTHS = [method_names()[turn::6] for turn in range(6)]


@pytest.fixture(scope="module")
def kind(request):
    return tiny_model(request.param)


def serves(method, model):
    layers, (attention, *_) = geometry_of_model(model).layers, attention_modules(model)
    if method.wants_next_query and not (hasattr(attention, "q_proj") or hasattr(attention, "qkv_proj")):
        return False
    if any(layer.readers for layer in layers) and getattr(method.Config(), "prefill_window", None) is not None:
        return False
    return layers[0].latent is None or method.no_latents is None


@pytest.mark.parametrize(("kind", "names"), crossed(ALL, SIXTHS, turns=6), indirect=["kind"])
def test_methods_continue_as_transformers_does(kind, names):
    ids = prompt(1, TEXT)
    reference = kind.generate(torch.tensor([ids]), max_new_tokens=STEPS, do_sample=False, eos_token_id=None)
    reference = reference[0, TEXT:].tolist()
    assert len(set(reference)) > STEPS / 3, "a reference that repeats itself tests little"
    with engine(in_memory(kind), [TEXT + STEPS]) as ready:
        methods, names = [], [name for name in names if serves(get_method(name), kind)]
        for name in names:
            method = get_method(name)
            wanted = {**AMPLE, **method.exact}
            if any(layer.readers for layer in ready.layers):  # read by no windows
                del wanted["prefill_window"]
            config = method.Config(**settings(name, wanted))
            methods.append(method(config, ready.layers, ready.context(TEXT, STEPS)))
        logits = ready.prefill(ids, methods, chunk=WINDOW + 6)
        sequences = [ready.sequence(method, Sampling(max_tokens=STEPS, ignore_eos=True)) for method in methods]
        for sequence, row in zip(sequences, logits, strict=True):
            sequence.accept(row)
        for _ in ready.decode(sequences):
            pass
    found = {name: sequence.token_ids for name, sequence in zip(names, sequences, strict=True)}
    assert found == dict.fromkeys(found, reference)


@pytest.mark.parametrize("name", [name for name in method_names() if get_method(name).no_latents is None])
def test_a_latent_is_kept_once(name, monkeypatch):
    """A small budget chooses, evicts and moves the same whether keys and values are one tensor or two alike."""
    model, prompts = tiny_model("deepseek_v3", layers=3), [prompt(2, TEXT), prompt(3, 43)]
    once = run(model, name, settings(name, SMALL), prompts, FEWER, chunk=TEXT)
    monkeypatch.setattr(LayerGeometry, "parts", 2)
    twice = run(model, name, settings(name, SMALL), prompts, FEWER, chunk=TEXT)
    assert [sequence.token_ids for sequence in once] == [sequence.token_ids for sequence in twice]
    for one, two in zip(once, twice, strict=True):
        held, both = one.method.footprint(), two.method.footprint()
        assert (
            0.5 <= (held.device + held.host) / (both.device + both.host) < 0.8
        )  # page tables, indices and bounds stay


@pytest.mark.parametrize("kind", ALL, indirect=True)
def test_company_changes_nothing(kind):
    prompts = [prompt(1, 1), prompt(2, 2 * WINDOW), prompt(3, TEXT)]
    together = run(kind, "freekv", settings("freekv", SMALL), prompts, FEWER, chunk=WINDOW + 6)
    alone = [run(kind, "freekv", settings("freekv", SMALL), [ids], FEWER, chunk=TEXT)[0] for ids in prompts]
    assert [sequence.token_ids for sequence in together] == [sequence.token_ids for sequence in alone]
