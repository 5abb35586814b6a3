"""Layers on several devices: the text of one, each layer's tensors where it lies, and nothing on a wrong device."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from fake_cuda import CUDA, PAIR, CurrentDevice, Graphs, fake_cuda, method_on_fake_cuda, parts_on_fake_cuda
from fake_prefill import Prefilled
from replayed import Replayed

from kvcli.conformance.models import LAYERS, tiny_model
from kvcli.conformance.runs import in_memory
from kvcli.conformance.test_method import SMALL, prompt, settings
from kvcli.inputs.profiles import resolve_profile
from kvcli.kernels import _numba
from kvcli.kernels.norm_rope import Rotation
from kvcli.methods import get_method
from kvcli.models.devices import place
from kvcli.models.geometry import build_on_meta, geometry_of_model
from kvcli.models.loading import ModelSpec, read_config
from kvcli.models.rope import RopeTable
from kvcli.runtime import layer_major as hidden_states
from kvcli.runtime import prefill as prefill_offloader
from kvcli.runtime.decode import BlockingStepper, decode
from kvcli.runtime.device_transfer import DeviceTransfer, on_its_devices
from kvcli.runtime.device_transfer import current as current_device
from kvcli.runtime.engine import engine
from kvcli.runtime.gpu import stepper
from kvcli.runtime.gpu.piecewise import PiecewiseStepper
from kvcli.runtime.gpu.recorder import SerialStreams
from kvcli.runtime.gpu.stepper import SlotStepper
from kvcli.runtime.sampling import Sampling
from kvcli.telemetry.timeline import Timeline

CPU, LENGTH, STEPS = torch.device("cpu"), 75, 12


def placement_of(model, devices):
    return place(build_on_meta(model.config, model.dtype), geometry_of_model(model), devices, [1 << 30] * 2)


def made(ready, name, length=LENGTH):
    method = get_method(name)
    return method(
        method.Config(**settings(name, SMALL)), ready.layers, ready.context(length, STEPS, capacity=LENGTH + STEPS)
    )


def text(name, kind, placement, steps_by=None):
    """What a method writes, by blocking steps or by what `steps_by` makes of a hook, sequences and a rope."""
    model = tiny_model(kind)
    where = None if placement is None else placement_of(model, placement)
    with engine(replace(in_memory(model), placement=where), [LENGTH + STEPS]) as ready:
        method = made(ready, name)
        (logits,) = ready.prefill(prompt(3, LENGTH), [method], chunk=32)
        sequence = ready.sequence(method, Sampling(max_tokens=STEPS, ignore_eos=True))
        sequence.accept(logits)
        steps = BlockingStepper(ready.hook, ready.rope)
        if steps_by is not None:
            steps = steps_by(ready.hook, [sequence], ready.rope)
        for _ in decode(steps, [sequence], Timeline()):
            pass
        assert (ready.hook.transfer is None) == (placement is None)
    return sequence.token_ids


@pytest.mark.parametrize(
    ("name", "kind"),
    [("full", "llama"), ("freekv", "gemma2"), ("offload", "llama"), ("infinigen", "qwen3"), ("freekv", "qwen3_next")],
)
def test_pieces_of_one_cpu_write_the_text_of_one_device(name, kind):
    assert text(name, kind, (CPU, CPU)) == text(name, kind, None)


@pytest.mark.parametrize(
    ("name", "stepper"),
    [
        ("freekv", partial(SlotStepper, streams=SerialStreams())),
        ("infllm", PiecewiseStepper),
        ("infllm", partial(PiecewiseStepper, recorder=Replayed())),
    ],
)
def test_so_do_steps_over_slots_and_in_pieces_and_these_replayed(name, stepper, monkeypatch):
    monkeypatch.setattr(_numba, "numba", None)  # only what torch does is replayed here
    assert text(name, "llama", (CPU, CPU), stepper) == text(name, "llama", None)


def test_work_for_a_device_that_a_step_does_not_go_to_is_found(monkeypatch):
    monkeypatch.setattr(DeviceTransfer, "on", lambda _, device: current_device(device))
    _, graphs, _ = captured("infinigen", monkeypatch)
    assert any("in a graph of" in fault for fault in graphs.faults)


def long(monkeypatch):
    """A few chunks are a long prompt."""
    monkeypatch.setattr(hidden_states, "STREAMED_BYTES", 0)
    monkeypatch.setattr(prefill_offloader, "ALONE_BYTES", 0)


@pytest.mark.parametrize(("name", "streams"), [("freekv", True), ("freekv", False), ("offload", True), ("full", False)])
def test_a_prefill_on_two_gpus_puts_each_layer_where_it_lies(name, streams, monkeypatch):
    """A tensor on a wrong device is an error of the fake ones, and so is a kernel launched beside its tensors."""
    config = read_config(ModelSpec("llama-3-8b-1m", load_format="dummy"))
    config.num_hidden_layers = 4
    if streams:
        long(monkeypatch)
    with monkeypatch.context() as patch:
        read = Prefilled(config, resolve_profile(name), 3 * 4096, 256, patch, PAIR)
    assert read.logits[0].device == CUDA
    placement = read.method.context.placement
    assert set(placement.attending) == set(PAIR)
    for layer, device in enumerate(placement.attending):
        own = [x for x in vars(read.method.caches[layer]).values() if isinstance(x, torch.Tensor) and x.is_cuda]
        assert own or name == "offload"
        assert {x.device for x in own} <= {device}
    if name == "offload":
        assert [{x.device for x in each.buffers} for each in read.method.prefetchers] == [{device} for device in PAIR]
    held = read.method.footprint()
    assert sum(held.by_device) == held.device
    assert min(held.by_device) > 0


class FakeRotary:
    """A rotation of the right shapes on a device."""

    def __init__(self, device):
        self.device = device

    def rotation(self, d):
        tables = (torch.empty(LENGTH + STEPS, d, device=self.device) for _ in range(2))
        kinds = (torch.int32, torch.int32, torch.float32)
        return Rotation(*tables, *(torch.empty(d, dtype=kind, device=self.device) for kind in kinds))


def captured(name, monkeypatch):
    """Capture a step of two sequences on two made-up GPUs -> the stepper, its graphs, the notices."""
    model = tiny_model("llama")
    placement, sequences, notices = placement_of(model, PAIR), [], []
    with engine(in_memory(model), [LENGTH + STEPS]) as ready:
        for index, length in enumerate((LENGTH, 40)):
            method = made(ready, name, length)
            (logits,) = ready.prefill(prompt(index, length), [method])
            sequences.append(ready.sequence(method, Sampling(max_tokens=STEPS), index=index))
            sequences[-1].accept(logits)
        current = CurrentDevice(monkeypatch)
        with fake_cuda(monkeypatch, current) as (launched, _), on_its_devices(model, placement) as crossed:
            ready.hook.transfer = crossed
            parts_on_fake_cuda([*model.modules(), *(row for row in ready.rope._rows if isinstance(row, RopeTable))])
            for part, device in placement.modules.items():
                parts_on_fake_cuda(model.get_submodule(part).modules(), device)
            rotary = [FakeRotary(device) for device in placement.attending]
            for sequence in sequences:
                method_on_fake_cuda(sequence.method, placement).context.rotary = rotary
            monkeypatch.setattr(stepper, "fused_layers", lambda _: nullcontext())  # tries modules out on numbers
            with Graphs(monkeypatch, current) as graphs:
                step = SlotStepper(ready.hook, sequences, ready.rope, notices.append, streams=SerialStreams())
            step.pipeline.end(0)
            assert current.device == CUDA
            assert len(launched) >= LAYERS
    return step, graphs, notices


@pytest.mark.parametrize(("name", "order"), [("freekv", "0101010"), ("infinigen", "010101010"), ("tova", "01010")])
def test_a_step_on_two_gpus_is_captured_in_graphs_of_one_each(name, order, monkeypatch):
    """Of both their lengths, layers, then the choice of a token, and of both the log, where there is one.

    No kernel is launched beside its tensors: an error of the fake devices.
    """
    step, graphs, notices = captured(name, monkeypatch)
    assert notices == []
    assert graphs.faults == []
    (piece,) = step.recorder.pieces
    assert [stretch.device for stretch in piece] == [PAIR[int(index)] for index in order]
    assert all(stretch.graph.kernels for stretch in piece)
    for before, after in pairwise(piece):
        crossed = {(given.device, there.device) for given, there in after.arriving}
        assert crossed <= {(before.device, after.device)}
    assert step.tokens.device == step.logits.device == CUDA
    assert {each.rows.k.device for each in step.pipeline.layers[:2]} == {PAIR[0]}
    assert {each.rows.k.device for each in step.pipeline.layers[2:]} == {PAIR[1]}
    assert {device: side.lengths.seen.device for device, side in step.pipeline.sides.items()} == {
        each: each for each in PAIR
    }
