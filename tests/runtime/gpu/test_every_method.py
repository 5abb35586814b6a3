"""Every method that states its step, over slots against the blocking pipeline: driven by the listing."""

import gc

import pytest
import torch
from engine import run
from families import VOCAB, tiny_model
from races import Races
from stated import STATED, settings, variants

from kvcli.conformance.crossed import crossed, some
from kvcli.kernels import _triton
from kvcli.methods import get_method
from kvcli.runtime.decode import BlockingStepper
from kvcli.runtime.gpu.pipeline import SlotPipeline
from kvcli.runtime.gpu.stepper import SlotStepper
from kvcli.runtime.gpu.streams import CudaStreams, SerialStreams

# One has outgrown its budget, one does while it decodes, one never does.
LENGTHS = (91, 41, 7)
STEPS = 12


def prompts(*lengths):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


class Watched:
    """A stepper whose logits are kept, step by step."""

    def __init__(self, stepper):
        self.stepper, self.logits = stepper, []

    def step(self, batch):
        rows = self.stepper.step(batch)
        self.logits.append(torch.stack([logits for logits, _ in rows]))
        return rows

    def finish(self):
        self.stepper.finish()


def decoded(model, name, wanted, ids, steps, eos=(), over_slots=None):
    """The finished sequences, and the logits [b, vocab] of every step."""
    made = []

    def step(hook, rope, sequences):
        stepper = SlotStepper(hook, sequences, rope, streams=over_slots) if over_slots else BlockingStepper(hook, rope)
        made.append(Watched(stepper))
        return made[0]

    return run(model, name, wanted, ids, steps, eos=eos, step=step), made[0].logits


def assert_same(one, other, close=1e-3):
    (sequences, logits), (others, expected) = one, other
    for found, wanted in zip(logits, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=close, atol=close)
    for sequence, reference in zip(sequences, others, strict=True):
        assert sequence.token_ids == reference.token_ids
        assert sequence.finish_reason == reference.finish_reason
        found, wanted = sequence.report(), reference.report()
        assert found.correction == wanted.correction
        assert found.cache == wanted.cache
        assert sequence.counters.counts == reference.counters.counts
        assert sequence.method.statistics() == reference.method.statistics()


@pytest.mark.parametrize(("name", "switch"), list(variants()))
def test_steps_are_those_of_the_blocking_pipeline(name, switch):
    """A ragged batch across page boundaries: the same tokens, sets, counts and statistics, logits within rounding."""
    case = (tiny_model("llama"), name, settings(name, **switch), prompts(*LENGTHS), STEPS)
    assert_same(decoded(*case, over_slots=SerialStreams()), decoded(*case))


HELD = [
    name
    for name in STATED
    if "kv_dtype" in get_method(name).Config.model_fields
    and name not in ("refreekv", "offload")  # whose steps are not over slots with these settings
]


@pytest.mark.parametrize(("name", "held"), crossed(HELD, ["int8", "int4"]))
def test_steps_over_quantised_pages_of_the_host(name, held):
    """Of numbers half way between two codes, rounding of the model's sums decides."""
    switch = {"offload": True} if "offload" in get_method(name).Config.model_fields else {}
    wanted = settings(name, kv_dtype=held, **switch)
    case = (tiny_model("llama"), name, wanted, prompts(*LENGTHS), STEPS)
    assert_same(decoded(*case, over_slots=SerialStreams()), decoded(*case), close=1e-2)


@pytest.mark.parametrize("name", some(STATED, STATED[1::2]))
def test_sequences_that_have_room_for_less_than_the_budget(name):
    case = (tiny_model("llama"), name, settings(name), prompts(7, 12), 4)
    assert_same(decoded(*case, over_slots=SerialStreams()), decoded(*case))


@pytest.mark.parametrize(("name", "family"), crossed(STATED, ["gemma2", "gpt_oss", "llama4"]))
def test_steps_with_sliding_layers_chunks_softcaps_and_attention_sinks(name, family):
    case = (tiny_model(family), name, settings(name), prompts(77, 46), 6)
    assert_same(decoded(*case, over_slots=SerialStreams()), decoded(*case))


OVER_LATENTS = [(name, {}) for name in STATED if get_method(name).no_latents is None]


@pytest.mark.parametrize(("name", "wanted"), [*OVER_LATENTS, ("streaming", {"positions": "cache"})], ids=str)
def test_steps_over_latents(name, wanted):
    case = (tiny_model("deepseek_v3"), name, settings(name, **wanted), prompts(77, 46), 6)
    assert_same(decoded(*case, over_slots=SerialStreams()), decoded(*case))


@pytest.mark.parametrize("name", some(STATED, STATED[::2]))
def test_a_sequence_that_leaves_changes_nothing_for_the_others(name):
    model, ids = tiny_model("llama"), prompts(*LENGTHS)
    (first, *others), _ = decoded(model, name, settings(name), ids, 12)
    stop = next(token for token in first.token_ids[2:] if all(token not in each.token_ids for each in others))
    case = (model, name, settings(name), ids, 12, (stop,))
    overlapped, logits = decoded(*case, over_slots=SerialStreams())
    assert_same((overlapped, logits), decoded(*case))
    assert len(logits[-1]) < len(logits[0])


ALIKE = {"cake", "pyramidkv", "expected_attention", "kvzip", "full", "refreekv"}  # whose steps are those of snapkv
BY_KERNELS = [
    pytest.param(name, "llama", {}, marks=[pytest.mark.exhaustive] if name in ALIKE else []) for name in STATED
]
BY_KERNELS += [("freekv", "llama", {"kv_dtype": "int4"})]
BY_KERNELS += [("freekv", "deepseek_v3", {}), pytest.param("raas", "deepseek_v3", {}, marks=pytest.mark.exhaustive)]
BY_KERNELS += [("streaming", "llama", {"positions": "cache"})]


@pytest.mark.parametrize(("name", "family", "wanted"), BY_KERNELS, ids=str)
def test_steps_by_kernels_in_streams(name, family, wanted, monkeypatch):
    """The same by the Triton kernels, under their interpreter; what two streams touch is in order.

    A dense layer, and two that retrieve and can get in each other's way; the second step fills a page.
    """
    model = tiny_model(family, layers=3)
    case = (model, name, settings(name, **wanted), prompts(70), 3)
    expected = decoded(*case)
    races = Races(monkeypatch, model.parameters())
    start, step = SlotPipeline.start, SlotStepper._run

    def started(self):
        monkeypatch.setattr(_triton, "on_cpu", True)  # from here on: the prompt was read before
        start(self)

    def watched(self):
        with races:
            step(self)
            gc.collect()  # what nobody holds any more is free at once

    monkeypatch.setattr(SlotPipeline, "start", started)
    monkeypatch.setattr(SlotStepper, "_run", watched)
    assert_same(decoded(*case, over_slots=CudaStreams(torch.device("cpu"))), expected)
    assert races.accesses > 0
    assert races.found == set()
