"""EM-LLM against a slow re-derivation (event_oracle.py): made-up tensors, and what a model hands over."""

import pytest
import torch
from driver import HK, SOFTMAX, D, H, by_token, close, layers
from engine import SPARE, in_memory, new_method, profile_of, run
from event_oracle import EventLayer, Segments
from families import LAYERS, VOCAB, tiny_model

from kvcli.methods.em_llm import EMLLMConfig
from kvcli.models.geometry import geometry_of
from kvcli.models.rope import installed
from kvcli.runtime.engine import engine

COUNT, WORDS, WINDOW = 2, 13, 10
SETTINGS = {
    "budget": 60,
    "sink": 5,
    "window": 12,
    "prefill_window": WINDOW,
    "gamma": 0.5,
    "refine": "modularity",
    "refine_layers": 0.5,
    "min_event": 3,
    "max_event": 7,
    "representatives": 2,
    "contiguity": 0.3,
    "positions": "capped",
}


@pytest.fixture(scope="module")
def rotary():
    with installed(tiny_model("llama", layers=COUNT), [400]) as rope:
        yield rope.rotary(400)


@pytest.mark.parametrize(
    ("changed", "prompt", "steps"),
    [
        ({}, 134, 50),
        ({"refine": "conductance", "positions": "original", "refine_layers": 1.0}, 95, 20),
        ({"refine": "none", "contiguity": 0.0, "window": 6}, 95, 20),
    ],
    ids=["modularity", "conductance", "surprise alone, a window shorter than what is read"],
)
def test_every_window_and_every_step_match_the_oracle(changed, prompt, steps, rotary):
    settings, generator = {**SETTINGS, **changed}, torch.Generator().manual_seed(prompt)

    def noise(*shape):
        return torch.randn(*shape, generator=generator)

    method = new_method("em_llm", settings, layers(COUNT), prompt + steps, rotary=rotary)
    segments = Segments(settings)
    expected = [EventLayer(index, settings, segments, D**-0.5) for index in range(COUNT)]
    graph = expected[-max(1, round(settings["refine_layers"] * COUNT)) :]
    # Keys have much in common, as those of a model have: the graph's weights are above zero.
    sources = [tuple(noise(heads, prompt + steps, D) + 1.5 for heads in (H, HK, HK)) for _ in range(COUNT)]
    ids = torch.randint(WORDS, (prompt,), generator=generator).tolist()
    for start in range(0, prompt, WINDOW):
        part = slice(start, min(start + WINDOW, prompt))
        for layer, source in enumerate(sources):
            window = [x[:, part] for x in source]
            out = method.attend_window(layer, *window, SOFTMAX)
            wanted = expected[layer].window(*(by_token(x) for x in window))
            assert close(out.transpose(0, 1), wanted), f"window at {start}, layer {layer}"
        logits = 2 * noise(len(ids[part]), WORDS)
        method.take_logits(start, ids[part], logits)
        segments.read(ids[part], logits.double().softmax(-1).tolist(), graph)
        assert method.events.starts == segments.starts
    sizes = {after - before for before, after in zip(segments.starts, segments.starts[1:], strict=False)}
    assert min(sizes) >= 3
    assert max(sizes) <= 7
    assert len(sizes) > (1 if settings["refine"] == "conductance" else 2)
    assert (segments.moved > 0) == (settings["refine"] != "none")
    requested, misses = ([-getattr(layer, name) for layer in expected] for name in ("requested", "misses"))
    method.context.counters.next_step()
    for at in range(prompt, prompt + steps):
        for layer, source in enumerate(sources):
            token = [x[:, at] for x in source]
            out = method.attend(layer, *token, SOFTMAX)
            assert close(out, expected[layer].step(*(x.double().tolist() for x in token))), f"step {at - prompt}"
            cache = method.retrieval[layer]
            recalled = (cache.resident[cache.chosen] + settings["sink"]).tolist()
            assert recalled == sorted(t for b in expected[layer].chosen for t in expected[layer].tokens(b))
    counted = method.context.counters.cache()
    assert counted.pages_requested == HK * sum(requested + [layer.requested for layer in expected])
    assert counted.misses == HK * sum(misses + [layer.misses for layer in expected])
    assert 0 < counted.misses < counted.pages_requested
    gone = segments.starts[len(expected[0].block_keys)] - settings["sink"]
    assert counted.bytes_to_host == COUNT * gone * HK * 2 * D * 4
    statistics = method.statistics()
    assert statistics["events"] == len(expected[0].block_keys)
    assert statistics["decode"]["retrievals"] == COUNT * steps


def test_a_model_is_asked_what_it_expected_of_every_token():
    """Boundaries of a prompt read through a model are those of transformers' own logits, window after window."""
    model, ids = (
        tiny_model("llama"),
        torch.randint(3, VOCAB, (90,), generator=torch.Generator().manual_seed(1)).tolist(),
    )
    settings = {**SETTINGS, "budget": 4096, "positions": "original", "refine": "none"}
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([ids])).logits[0].double()
    with engine(in_memory(model), [len(ids) + SPARE]) as ready:
        method = ready.method(profile_of("em_llm", settings), ready.context(len(ids), SPARE))
        done = []
        (logits,) = ready.prefill(ids, [method], done.append)
    assert sum(done) == len(ids) * LAYERS
    assert torch.allclose(logits.double(), expected[-1], atol=1e-3)
    segments = Segments(settings)
    segments.read(ids, expected.softmax(-1).tolist(), [])
    assert method.events.starts == segments.starts
    assert len(segments.starts) > 8


def test_a_turn_goes_on_with_the_events_of_the_one_before():
    """Tokens read behind generated ones: the first of them was expected by nothing that is known."""
    method, noise = new_method("em_llm", SETTINGS, layers(1), 200), torch.Generator().manual_seed(3)

    def read(start, stop):
        q, k, v = (torch.randn(heads, stop - start, D, generator=noise) for heads in (H, HK, HK))
        method.attend_window(0, q, k, v, SOFTMAX)
        method.take_logits(start, list(range(stop - start)), torch.randn(stop - start, WORDS, generator=noise))

    for start in range(0, 50, WINDOW):
        read(start, start + WINDOW)
    assert method.surprises.last[-1] > 0
    for _ in range(15):
        method.attend(0, *(torch.randn(heads, D, generator=noise) for heads in (H, HK, HK)), SOFTMAX)
    read(65, 75)
    assert method.surprises.last[-10] == 0
    assert method.surprises.judged == 75
    read(75, 85)
    assert method.surprises.last[-10] > 0


def test_the_footprint_is_that_of_the_plan():
    (sequence,) = run(tiny_model("llama"), "em_llm", SETTINGS, [list(range(4, 154))], 20)
    geometry = geometry_of(tiny_model("llama").config, torch.float32).layers
    planned = new_method("em_llm", SETTINGS, geometry, 150 + 20 + SPARE).footprint()
    assert sequence.method.footprint() == planned


@pytest.mark.parametrize(
    "settings", [{"min_event": 200}, {"representatives": 9}, {"contiguity": 0.6}, {"refine": "cut"}, {"budget": 4000}]
)
def test_senseless_settings_are_refused(settings):
    with pytest.raises(ValueError, match=r"min_event 200|representatives 9|contiguity|refine|budget 4000"):
        EMLLMConfig(**settings)
