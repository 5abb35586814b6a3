from functools import partial

import pytest
import torch
from engine import run
from families import VOCAB, tiny_model

from kvcli.runtime.gpu import stepper
from kvcli.runtime.gpu.compiled import compiled_layers
from kvcli.runtime.gpu.recorder import SerialStreams
from kvcli.runtime.sampling import Sampling

SMALL = {"budget": 48, "sink": 8, "window": 8, "page_size": 8}


def prompt(length, seed=0):
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_sampled_texts_are_those_of_the_blocking_pipeline():
    steps = (tiny_model("llama"), "freekv", SMALL, [prompt(70), prompt(31, 1)], 20)
    sampling = Sampling(max_tokens=20, temperature=0.9, top_p=0.9, seed=5)
    overlapped, blocking = run(*steps, sampling, streams=SerialStreams()), run(*steps, sampling)
    assert [each.token_ids for each in overlapped] == [each.token_ids for each in blocking]
    assert overlapped[0].token_ids != run(*steps)[0].token_ids


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_compiled_layers_give_the_same_and_are_left_as_they_were(monkeypatch, family):
    """The compiler's front end alone: what it sees of the model, and where it has to stop."""
    monkeypatch.setattr(stepper, "compiled_layers", partial(compiled_layers, backend="eager"))
    model = tiny_model(family)
    steps = (model, "freekv", SMALL, [prompt(60)], 8)
    expected = run(*steps)[0].token_ids

    def compiled_steps(hook, rope, sequences):
        return stepper.SlotStepper(hook, sequences, rope, compiled=True, streams=SerialStreams())

    compiled = []
    original = stepper.SlotStepper._run

    def watched(self):
        compiled.append(all(layer._compiled_call_impl is not None for layer in model.get_decoder().layers))
        original(self)

    monkeypatch.setattr(stepper.SlotStepper, "_run", watched)
    assert run(*steps, step=compiled_steps)[0].token_ids == expected
    assert compiled == [True] * 7
    assert all(layer._compiled_call_impl is None for layer in model.get_decoder().layers)
