import pytest
import torch
from families import FAMILIES, tiny_config

from kvcli.capacity import memory
from kvcli.capacity.planning import estimate, probe
from kvcli.capacity.planning.estimate import Machine, PlannedRun, prefill_work
from kvcli.capacity.roofline import MachineRates, Rate
from kvcli.inputs.profiles import resolve_profile
from kvcli.methods import get_method, method_names
from kvcli.models import dummy
from kvcli.models.geometry import geometry_of
from kvcli.models.weights import form_of, installed

CPU = torch.device("cpu")
RATES = MachineRates(*(Rate.given(1e9) for _ in range(4)), Rate.given(1e11))
SMALL = {"budget": 48, "sink": 8, "window": 8, "page_size": 8, "dense_layers": 1, "chunk": 4, "rank": 12}
SMALL |= {"outliers": 2, "local": 1, "prefill_window": 20}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(probe, "STEPS", 3)
    monkeypatch.setattr(probe, "_FEW", 1)
    monkeypatch.setattr(probe, "PROMPT", 8)


def profile(name):
    fields = get_method(name).Config.model_fields
    return resolve_profile(name, overrides={key: value for key, value in SMALL.items() if key in fields})


def estimated(name, context, batch=1, family="llama", here=True, rates=RATES, stored=None):
    config = tiny_config(family)
    if stored is not None:
        config.quantization_config = stored
    subject, chosen = PlannedRun.of(config, torch.float32, form_of(config, "auto", CPU)), profile(name)
    method = memory.planned_method(chosen, subject.geometry, context + 16, subject.dtype, context)
    machine = Machine(CPU, {"host": 8 << 30}, rates, here)
    return estimate.estimate(subject, machine, chosen, method, context, batch)


@pytest.mark.parametrize("name", method_names())
def test_every_method_can_be_tried(name):
    times = estimated(name, 100, batch=2)
    assert times.tried == times.layers == 4
    assert times.tried_length == 100
    assert times.step > 0
    assert times.prefill > 0
    assert (times.missed is None) or 0 <= times.missed <= 1


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_shortened_and_tried(family):
    config = probe.shortened(tiny_config(family), 2, 4)
    found = probe.probe(profile("freekv"), config, torch.float32, CPU, 100, 1)
    assert len(found.layers) == 2
    assert min(found.layers) > 0
    assert found.rest > 0


@pytest.mark.skipif(not installed("bitsandbytes"), reason="bitsandbytes is not installed (the extra kvcli[weights])")
@pytest.mark.parametrize("load", ["load_in_8bit", "load_in_4bit"])
def test_weights_that_are_stored_quantised_are_tried_as_they_multiply(load, monkeypatch):
    made = []

    def random_model(config, dtype, device, form):
        made.append(form.name)
        return dummy.random_model(config, dtype, device, form)

    monkeypatch.setattr(probe, "random_model", random_model)
    times = estimated("freekv", 100, stored={"quant_method": "bitsandbytes", load: True})
    assert made == [{"load_in_8bit": "int8", "load_in_4bit": "int4"}[load]]
    assert times.tried == 4
    assert times.step > times.roofline
    unknown = estimated("freekv", 100, stored={"quant_method": "gptq", "bits": 4})
    assert (unknown.tried, unknown.step) == (0, unknown.roofline)


def test_what_is_too_long_to_try_is_tried_shorter_and_carried_on(monkeypatch):
    seen = []

    def stub(chosen, config, dtype, device, length, batch, form):
        seen.append((config.num_hidden_layers, length, batch))
        geometry = geometry_of(config, dtype)
        layers = [0.25 * (index + 1) for index in range(len(geometry.layers))]
        return probe.Probe(geometry, length, layers, 0.5, 0.125, None, 1e6)

    monkeypatch.setattr(estimate, "probe", stub)
    monkeypatch.setattr(probe, "TRIED_BYTES", 1 << 20)
    token = 2 * 2 * 16 * 4  # bytes of KV in a layer
    times = estimated("full", 100_000, batch=2)
    ((layers, length, batch),) = seen
    assert (layers, batch) == (1, 2)
    assert (1 << 20) * 0.5 < length * token * 2 <= 1 << 20
    beyond = 4 * 2 * (100_000 - length) * token / 1e6  # layers, sequences
    assert times.step == pytest.approx(0.5 + 4 * 0.25 + beyond)
    assert (times.tried, times.layers, times.tried_length) == (1, 4, length)
    seen.clear()
    assert estimated("freekv", 100_000).tried == 2, "a dense layer and one that retrieves"
    assert seen[0][1] > 48, "long enough to leave something out"


def test_layers_take_what_those_of_their_kind_took(monkeypatch):
    def stub(chosen, config, dtype, device, length, batch, form):
        geometry = geometry_of(config, dtype)
        return probe.Probe(geometry, length, [3.0, 1.0][: len(geometry.layers)], 0.0, 0.0, None, 1e9)

    monkeypatch.setattr(estimate, "probe", stub)
    monkeypatch.setattr(probe, "TRIED_BYTES", 1)
    times = estimated("freekv", 100)
    assert times.tried == 2
    assert times.step == pytest.approx(3 + 1 + 1 + 1)  # the first is dense


@pytest.mark.parametrize("layer_seconds", [1e-9, 1.0])
def test_a_step_is_never_shorter_than_its_roofline(monkeypatch, layer_seconds):
    """Rates measured while the machine was busy were too low, and the layers that ran afterwards were faster."""

    def stub(chosen, config, dtype, device, length, batch, form):
        geometry = geometry_of(config, dtype)
        return probe.Probe(geometry, length, [layer_seconds] * len(geometry.layers), 0.0, 0.0, None, 1e12)

    monkeypatch.setattr(estimate, "probe", stub)
    slow = MachineRates(*(Rate.given(1e6) for _ in range(5)))
    times = estimated("freekv", 100, rates=slow)
    assert 0 < times.roofline <= times.step
    assert sum(seconds for _, seconds in times.phases.values()) == pytest.approx(times.roofline)


def test_another_machine_gets_the_least_time_and_none_without_rates():
    times = estimated("freekv", 300, here=False)
    assert times.step == times.roofline > 0
    assert times.tried == 0
    assert estimated("freekv", 300, here=False, rates=None) is None


def test_what_has_no_room_is_not_tried():
    subject, chosen = PlannedRun.of(tiny_config("llama"), torch.float32), profile("full")
    method = memory.planned_method(chosen, subject.geometry, 116, subject.dtype, 100)
    times = estimate.estimate(subject, Machine(CPU, {"host": 1000}, RATES, True), chosen, method, 100, 1)
    assert times.tried == 0


def test_a_prompt_costs_linear_and_quadratic_operations():
    subject = PlannedRun.of(tiny_config("llama"), torch.float32)
    parts = subject.geometry.parts

    def operations(name, length):
        method = memory.planned_method(profile(name), subject.geometry, length, subject.dtype)
        return prefill_work(subject.geometry, method, length).operations

    linear = 2 * (1000 * (parts.projections + parts.mlp) + parts.head) // 4
    assert operations("full", 1000) == linear + 4 * 4 * 4 * 16 * (1000 * 1001 // 2)  # layers, 4 H d, pairs
    seen = 20 + 48  # of the window and the budget, in layers that are not dense
    bounded = seen * (seen + 1) // 2 + (1000 - seen) * seen
    assert operations("infllm", 1000) == linear + 4 * 4 * 16 * (1000 * 1001 // 2 + 3 * bounded)
