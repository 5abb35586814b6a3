"""Layers that keep no KV and attend to that of an earlier layer: it is computed, planned, held and saved once."""

from dataclasses import replace

import pytest
import torch
from families import LAYERS, VOCAB, WINDOW, tiny_config, tiny_model

from kvcli.capacity import memory
from kvcli.capacity.planning.probe import few_layers
from kvcli.capacity.roofline import step_work
from kvcli.conformance.runs import SPARE, in_memory, run
from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.profiles import resolve_profile
from kvcli.models.devices import place
from kvcli.models.geometry import build_on_meta, geometry_of
from kvcli.models.layers import LayerFinder
from kvcli.runtime.cpu_layers import CpuKernels
from kvcli.runtime.engine import engine
from kvcli.runtime.fused import fused_by
from kvcli.runtime.gpu.piecewise import PiecewiseStepper
from kvcli.runtime.prefill import Branches

KINDS = ("gemma4", "gemma3n")
STEPS = 12


def tokens(length, seed):
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    return tiny_model(request.param)


def test_layers_that_read_and_layers_that_are_read(model):
    geometry = geometry_of(model.config, torch.float32)
    assert [(layer.window, layer.readers) for layer in geometry.layers] == [(WINDOW, 1), (None, 1)]
    assert [layer.reader and layer.reader.layer for layer in geometry.decoder] == [None, None, 0, 1]
    assert not any(layer.keeps for layer in geometry.decoder[2:])
    assert geometry.depth == LAYERS


@pytest.mark.parametrize("kind", KINDS)
def test_without_shared_layers_all_keep_kv(kind):
    config = tiny_config(kind)
    config.num_kv_shared_layers = 0
    geometry = geometry_of(config, torch.float32)
    assert len(geometry.layers) == LAYERS
    assert not geometry.shares


def test_kv_is_held_and_planned_once(model):
    geometry, ids = geometry_of(model.config, torch.float32), tokens(70, 1)
    (sequence,) = run(model, "full", {}, [ids], STEPS)
    of_layers = [WINDOW, len(ids) + STEPS + SPARE]
    expected = sum(4 * layer.token_size * rows for layer, rows in zip(geometry.layers, of_layers, strict=True))
    assert sequence.method.footprint().device == expected
    planned = memory.kv_footprint(resolve_profile("full"), geometry, of_layers[1], torch.float32, len(ids))
    assert planned == sequence.method.footprint()


def test_a_step_reads_kv_again_for_each_reader(model):
    geometry = geometry_of(model.config, torch.float32)
    alone = replace(geometry, layers=tuple(replace(layer, readers=0) for layer in geometry.layers))
    method = memory.planned_method(resolve_profile("full"), geometry, 90, torch.float32)
    once, twice = (step_work(each, 4, [(method, 80)])["attention"].read for each in (alone, geometry))
    assert twice == 2 * once > 0


@pytest.mark.parametrize("name", ["full", "freekv"])
def test_questions_on_one_document_are_read_together(model, name):
    """Each ends where it would alone: layers that read run for the last token of every question."""
    document, rests = tokens(60, 1), [tokens(length, seed) for seed, length in enumerate((9, 1, 30), 2)]
    settings = {} if name == "full" else {"budget": 4096}
    profile = resolve_profile(name, overrides=settings)
    with engine(in_memory(model), [len(document) + 30 + STEPS]) as ready:

        def read(branches):
            contexts = [ready.context(len(document) + len(rest), STEPS, capacity=102) for rest in branches.rests]
            methods = [[ready.method(profile, context)] for context in contexts]
            return [row[0] for row in ready.prefill_branches(branches, methods, chunk=WINDOW + 6)]

        together = read(Branches(document, rests))
        alone = [read(Branches(document, [rest]))[0] for rest in rests]
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_reader_chooses_by_its_own_query(model):
    """Within a small budget the layer that reads asks for pages of its own, in addition to those of the owner."""
    small = {"budget": 48, "sink": 8, "window": 8, "page_size": 8, "dense_layers": 0}
    (sequence,) = run(model, "quest", small, [tokens(90, 3)], STEPS)
    selected = (small["budget"] - small["sink"] - small["window"]) // small["page_size"]
    retrieving = sequence.counters.cache().layers[1]
    assert retrieving.pages_requested == 2 * 2 * selected * (STEPS - 1)  # two KV heads, and two layers that ask


def test_steps_in_pieces_are_the_same(model):
    prompts, small = [tokens(90, 3), tokens(50, 4)], {"budget": 48, "sink": 8, "window": 8, "page_size": 8}
    expected = [each.token_ids for each in run(model, "freekv", small, prompts, STEPS)]

    def pieces(hook, rope, sequences):
        return PiecewiseStepper(hook, sequences, rope)

    assert [each.token_ids for each in run(model, "freekv", small, prompts, STEPS, step=pieces)] == expected


def test_methods_that_read_by_windows_are_refused(model):
    with pytest.raises(KvcliError, match="reads prompts by windows, and layers of this model read the KV") as caught:
        run(model, "infllm", {}, [tokens(30, 1)], 2)
    assert caught.value.exit_code == ExitCode.USAGE


def test_several_devices_are_refused():
    config = tiny_config("gemma4")
    geometry = geometry_of(config, torch.float32)
    devices = [torch.device("cuda", index) for index in range(2)]
    with pytest.raises(KvcliError, match="which lies on one device"):
        place(build_on_meta(config, torch.float32), geometry, devices, [1 << 30] * 2)


@pytest.mark.parametrize("kind", ["gemma4", "longcat_flash"])
def test_a_plan_tries_all_layers_or_none(kind):
    """The first config counts the layers that read from the end, the second counts attentions."""
    config = tiny_config(kind)
    geometry, free = geometry_of(config, torch.float32), {"host": 1 << 40}
    found = few_layers(config, geometry, torch.float32, resolve_profile("freekv"), 4096, 1, free, most=1)
    assert found is not None
    assert found[0].num_hidden_layers == LAYERS


def test_readers_before_layers_that_keep_kv_are_refused(monkeypatch):
    attention, keys = LayerFinder._attention, []

    def first_again(self, module, query, key, *args, **kwargs):
        keys.append(key)
        return attention(self, module, query, keys[0] if module.layer_idx == 1 else key, *args, **kwargs)

    monkeypatch.setattr(LayerFinder, "_attention", first_again)
    with pytest.raises(KvcliError, match="layer 1 reads the keys and values of another, and later ones do not"):
        geometry_of(tiny_config("llama"), torch.float32)


def test_layers_of_a_cpu_leave_a_rotation_of_single_tensors_alone(model):
    """The function that rotates takes a query or a key, where others take both."""
    ids = tokens(40, 1)
    expected = model.generate(torch.tensor([ids]), max_new_tokens=STEPS, do_sample=False, eos_token_id=None)
    with fused_by(CpuKernels(), model):
        (sequence,) = run(model, "full", {}, [ids], STEPS)
    assert sequence.token_ids == expected[0, len(ids) :].tolist()
