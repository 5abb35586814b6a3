from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from engine import run
from families import VOCAB, tiny_model

from kvcli.runtime.gpu import stepper
from kvcli.runtime.gpu.compiled import compiled_layers
from kvcli.runtime.gpu.streams import SerialStreams
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


def test_why_a_capture_fails_is_told(monkeypatch):
    """The end of a capture that was broken off fails, too; the stream is left all the same."""
    current = [0]

    @contextmanager
    def stream(_):
        current[0] += 1
        try:
            yield
        finally:
            current[0] -= 1

    @contextmanager
    def graph(_, stream):
        assert current == [1]
        try:
            yield
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    def step():
        if len(tried) == stepper.WARM_UP:
            raise RuntimeError("operation not permitted when stream is capturing\nand where to read about it")
        tried.append(current[0])

    beside = SimpleNamespace(wait_stream=lambda _: None)
    fakes = {"Stream": lambda _: beside, "current_stream": lambda _: beside, "CUDAGraph": object}
    for name, fake in (fakes | {"stream": stream, "graph": graph}).items():
        monkeypatch.setattr(torch.cuda, name, fake)
    tried, notices = [], []
    one = object.__new__(stepper.SlotStepper)
    model = SimpleNamespace(device=torch.device("cpu"))
    one.hook, one.pipeline = SimpleNamespace(model=model), SimpleNamespace(waits_for_device=False)
    one.graph, one._run = None, step
    one._capture(notices.append)
    assert tried == [1] * stepper.WARM_UP
    assert current == [0]
    assert one.graph is None
    (notice,) = notices
    assert notice.endswith("launched one by one: operation not permitted when stream is capturing")
