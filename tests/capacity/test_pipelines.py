from dataclasses import replace

import pytest
import torch
from families import VOCAB, tiny_checkpoint, tiny_config

from kvcli.capacity import pipelines
from kvcli.errors import KvcliError
from kvcli.inputs.profiles import profile_names, resolve_profile
from kvcli.methods import get_method
from kvcli.methods.card import BLOCKING, GRAPH, PIECEWISE, gpu_step_of
from kvcli.models.devices import Placement
from kvcli.models.geometry import geometry_of
from kvcli.models.loading import ModelSpec, open_checkpoint
from kvcli.runtime import pipeline as steppers
from kvcli.runtime.engine import engine
from kvcli.runtime.sampling import Sampling

LENGTH, STEPS = 40, 3
STEPPERS = {GRAPH: "SlotStepper", PIECEWISE: "PiecewiseStepper"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    tiny_checkpoint("llama", path)
    return open_checkpoint(ModelSpec(str(path)))


@pytest.fixture(scope="module")
def model(checkpoint):
    return checkpoint.load()


def watched(kind, made):
    def make(*args):
        made.append(kind(*args))
        return made[-1]

    return make


@pytest.mark.parametrize(("family", "methods"), [("glm5_next", ("native", "full")), ("bloom", ("full", "freekv"))])
def test_what_the_models_own_modules_do_is_blocking(family, methods, checkpoint):
    geometry = geometry_of(tiny_config(family), torch.float32)
    for method in methods:
        assert pipelines.choose("auto", resolve_profile(method), replace(checkpoint, geometry=geometry)) == "blocking"
        with pytest.raises(KvcliError, match="blocking pipeline alone"):
            pipelines.choose("overlapped", resolve_profile(method), replace(checkpoint, geometry=geometry))


@pytest.mark.parametrize("method", ["native", "full"])
def test_layers_that_select_by_themselves_are_served_in_pieces(method, monkeypatch, tmp_path):
    checkpoint = open_checkpoint(ModelSpec(str(tiny_checkpoint("deepseek_v32", tmp_path))))
    profile, made = resolve_profile(method), []
    assert pipelines.choose("overlapped", profile, checkpoint) == "overlapped"
    on_two = replace(checkpoint, placement=Placement({}, (), (), ()))
    with pytest.raises(KvcliError, match="several devices"):
        pipelines.choose("overlapped", profile, on_two)
    for each in STEPPERS.values():
        monkeypatch.setattr(steppers, each, watched(getattr(steppers, each), made))
    texts = []
    for pipeline in ("overlapped", "blocking"):
        with engine(checkpoint.load(), [LENGTH + STEPS]) as ready:
            own = ready.method(profile, ready.context(LENGTH, STEPS))
            (logits,) = ready.prefill([token % VOCAB for token in range(3, 3 + LENGTH)], [own])
            sequence = ready.sequence(own, Sampling(max_tokens=STEPS, ignore_eos=True))
            sequence.accept(logits)
            list(ready.decode([sequence], pipeline=pipeline))
            texts.append(sequence.token_ids)
    assert [type(stepper).__name__ for stepper in made] == ["PiecewiseStepper"]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", profile_names())
def test_every_shipped_profile_is_served_by_the_pipeline_that_its_method_promises(name, checkpoint, model, monkeypatch):
    profile, made = resolve_profile(profile=name), []
    promised = gpu_step_of(get_method(profile.method), profile.settings)
    assert promised != BLOCKING
    assert pipelines.choose("overlapped", profile, checkpoint) == "overlapped"
    for each in STEPPERS.values():
        monkeypatch.setattr(steppers, each, watched(getattr(steppers, each), made))
    with engine(model, [LENGTH + STEPS]) as ready:
        method = ready.method(profile, ready.context(LENGTH, STEPS))
        (logits,) = ready.prefill([token % VOCAB for token in range(3, 3 + LENGTH)], [method])
        sequence = ready.sequence(method, Sampling(max_tokens=STEPS, ignore_eos=True))
        sequence.accept(logits)
        steps = list(ready.decode([sequence], pipeline="overlapped"))
    assert [type(stepper).__name__ for stepper in made] == [STEPPERS[promised]]
    assert len(steps) == STEPS - 1


@pytest.mark.parametrize(
    ("lengths", "served"), [([53], GRAPH), ([62], PIECEWISE), ([70, 64], GRAPH), ([70, 62], PIECEWISE)]
)
def test_a_context_that_is_divided_while_it_is_decoded_is_served_in_pieces(lengths, served, model, monkeypatch):
    """ShadowKV+ has room for 64 tokens here; one that never gets there, or begins beyond, keeps its form."""
    settings, made = {"plus": True, "budget": 48, "chunk": 4, "outliers": 2, "local": 1, "rank": 12}, []
    for each in STEPPERS.values():
        monkeypatch.setattr(steppers, each, watched(getattr(steppers, each), made))
    texts = []
    for pipeline in ("overlapped", "blocking"):
        with engine(model, [length + STEPS for length in lengths]) as ready:
            sequences = []
            for length in lengths:
                method = ready.method(
                    resolve_profile(method="shadowkv", overrides=settings), ready.context(length, STEPS)
                )
                (logits,) = ready.prefill([token % VOCAB for token in range(3, 3 + length)], [method])
                sequences.append(ready.sequence(method, Sampling(max_tokens=STEPS, ignore_eos=True)))
                sequences[-1].accept(logits)
            list(ready.decode(sequences, pipeline=pipeline))
            texts.append([sequence.token_ids for sequence in sequences])
    assert [type(stepper).__name__ for stepper in made] == [STEPPERS[served]]
    assert texts[0] == texts[1]
