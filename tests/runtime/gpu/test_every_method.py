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
from kvcli.methods.config import HostKVConfig
from kvcli.runtime.decode import BlockingStepper
from kvcli.runtime.gpu.pipeline import SlotPipeline
from kvcli.runtime.gpu.recorder import WARM_UP, CudaStreams, SerialStreams
from kvcli.runtime.gpu.stepper import SlotStepper

# One has outgrown its budget, one does while it decodes, one never does.
LENGTHS = (91, 43, 7)
STEPS = 9


def llama():
    """A dense layer, and two that retrieve and can get in each other's way."""
    return tiny_model("llama", layers=3)


def prompts(*lengths):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


class Rehearsing:
    """Stands for graphs: tries a step out before the first one, by default as often as is done before a capture."""

    def __init__(self, times=WARM_UP):
        self.times = times

    def record(self, rehearse, work, leave):
        for _ in range(self.times):
            rehearse()
        self.step = rehearse

    def replay(self, piece):
        self.step()


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


def decoded(model, name, wanted, ids, steps, eos=(), over_slots=None, rehearsals=WARM_UP):
    """The finished sequences, and the logits [b, vocab] of every step."""
    made = []

    def step(hook, rope, sequences):
        if over_slots is None:
            stepper = BlockingStepper(hook, rope)
        else:
            stepper = SlotStepper(hook, sequences, rope, streams=over_slots, recorder=Rehearsing(rehearsals))
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
    case = (llama(), name, settings(name, **switch), prompts(*LENGTHS), STEPS)
    assert_same(decoded(*case, over_slots=SerialStreams()), decoded(*case))


HELD = [
    name
    for name in STATED
    if issubclass(get_method(name).Config, HostKVConfig)
    and name not in ("refreekv", "offload")  # whose steps are not over slots with these settings
]


@pytest.mark.parametrize(("name", "held"), crossed(HELD, ["int8", "k8v4", "int4"]))
def test_steps_over_quantised_pages_of_the_host(name, held):
    """Of numbers half way between two codes, rounding of the model's sums decides."""
    switch = {"offload": True} if "offload" in get_method(name).Config.model_fields else {}
    wanted = settings(name, kv_dtype=held, **switch)
    case = (llama(), name, wanted, prompts(*LENGTHS), STEPS)
    assert_same(decoded(*case, over_slots=SerialStreams()), decoded(*case), close=1e-2)


@pytest.mark.parametrize("name", some(STATED, STATED[1::2]))
def test_sequences_that_have_room_for_less_than_the_budget(name):
    case = (llama(), name, settings(name), prompts(7, 12), 4)
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


LEAVING = [*[(name, {}) for name in STATED], ("shadowkv", {"plus": True})]


@pytest.mark.parametrize("method", some(LEAVING, [*LEAVING[:-1:2], LEAVING[-1]]), ids=str)
def test_a_sequence_that_leaves_changes_nothing_for_the_others(method):
    name, wanted = method
    model, ids, wanted = llama(), prompts(*LENGTHS), settings(name, **wanted)
    (first, *others), _ = decoded(model, name, wanted, ids, STEPS)
    stop = next(token for token in first.token_ids[2:] if all(token not in each.token_ids for each in others))
    case = (model, name, wanted, ids, STEPS, (stop,))
    overlapped, logits = decoded(*case, over_slots=SerialStreams())
    assert_same((overlapped, logits), decoded(*case))
    assert len(logits[-1]) < len(logits[0])


@pytest.mark.parametrize(
    ("family", "lengths", "wanted"),
    [
        ("llama", (84, 85, 86, 87), {}),
        ("llama", (70, 71, 72, 9), {"chunk": 3, "local": 2}),
        ("llama", (61, 64), {"chunk": 1, "local": 3}),
        ("llama", (83, 68), {"kv_dtype": "int8"}),
        ("llama", (83, 68), {"kv_dtype": "int4", "fp8": True}),
        ("gpt_oss", (77, 70), {}),
        ("llama4", (77, 70), {}),
    ],
    ids=str,
)
def test_what_leaves_a_rolling_window_is_kept_as_in_the_blocking_pipeline(family, lengths, wanted):
    """From every place in a chunk on, and over several of them: the same means, low-rank keys, values and choice."""
    case = (tiny_model(family), "shadowkv", settings("shadowkv", plus=True) | wanted, prompts(*lengths), STEPS)
    over_slots, blocking = decoded(*case, over_slots=SerialStreams()), decoded(*case)
    assert_same(over_slots, blocking, close=1e-2 if "kv_dtype" in wanted else 1e-3)
    for sequence, reference in zip(over_slots[0], blocking[0], strict=True):
        for layer, cache in reference.method.retrieval.items():
            found, stored = sequence.method.caches[layer], cache.num_chunks
            if not stored:
                continue
            assert torch.equal(found.resident.sort().values, cache.resident.sort().values)
            for part, of_blocking in (
                (found.landmarks.means[:, :stored], cache.landmarks.means[:, :stored]),
                (found.keys.a[:stored], cache.keys.a[:stored]),
                *((x[:stored], y[:stored]) for x, y in zip(found.values.pieces, cache.values.pieces, strict=True)),
            ):
                if part.dtype != torch.uint8:  # codes, which rounding of the model's sums decides
                    torch.testing.assert_close(part, of_blocking, rtol=1e-4, atol=1e-4)
    assert any(sequence.report().cache.bytes_to_host for sequence in over_slots[0])


ALIKE = {"cake", "pyramidkv", "expected_attention", "kvzip", "full", "refreekv"}  # whose steps are those of snapkv
ALIKE |= {"tova", "loki"}  # whose kernels are those of h2o and infinigen
ALIKE |= {"freekv", "shadowkv", "streaming", "quest"}  # which the cases below hold, with more to do
BY_KERNELS = [
    pytest.param(name, "llama", {}, marks=[pytest.mark.exhaustive] if name in ALIKE else []) for name in STATED
]
BY_KERNELS += [("freekv", "llama", {"kv_dtype": "int4"})]
BY_KERNELS += [(name, "llama", {"offload": True}) for name in ("quest", "loki", "twilight")]
BY_KERNELS += [("freekv", "deepseek_v3", {}), pytest.param("raas", "deepseek_v3", {}, marks=pytest.mark.exhaustive)]
BY_KERNELS += [("streaming", "llama", {"positions": "cache"}), ("shadowkv", "llama", {"plus": True, "fp8": True})]


@pytest.mark.parametrize(("name", "family", "wanted"), BY_KERNELS, ids=str)
def test_steps_by_kernels_in_streams(name, family, wanted, monkeypatch):
    """The same by the Triton kernels, under their interpreter; what two streams touch is in order.

    The second step fills a page.
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
    assert_same(decoded(*case, over_slots=CudaStreams(torch.device("cpu")), rehearsals=1), expected)
    assert races.accesses > 0
    assert races.found == set()
