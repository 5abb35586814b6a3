"""Steps in pieces against the blocking pipeline."""

import pytest
import torch
from engine import run
from families import VOCAB, of_this_version, tiny_model
from replayed import Replayed
from stated import settings, variants

from kvcli.conformance.crossed import crossed
from kvcli.kernels import _numba
from kvcli.methods.card import BLOCKING, PIECEWISE, gpu_step_of
from kvcli.runtime.decode import BlockingStepper
from kvcli.runtime.gpu.piecewise import PiecewiseStepper

CASES = list(variants(PIECEWISE))
STEPS = 9


def prompts():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (91, 41, 7)]


@pytest.mark.parametrize(("name", "switch"), CASES)
def test_steps_in_pieces_are_those_of_the_blocking_pipeline(name, switch, monkeypatch):
    monkeypatch.setattr(_numba, "numba", None)  # only what torch does is replayed here
    recorders, wanted = [], settings(name, **switch)

    def step(hook, rope, sequences):
        recorders.append(Replayed())
        return PiecewiseStepper(hook, sequences, rope, recorder=recorders[0])

    model = tiny_model("llama", layers=3)
    free = run(model, name, wanted, prompts(), STEPS)
    stop = next(token for token in free[0].token_ids[2:] if all(token not in each.token_ids for each in free[1:]))
    case = (model, name, wanted, prompts(), STEPS)
    found, expected = run(*case, eos=(stop,), step=step), run(*case, eos=(stop,))
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.counters.counts == other.counters.counts
        assert one.method.statistics() == other.method.statistics()
    assert len(recorders[0].pieces) == model.config.num_hidden_layers + 1


def test_pieces_are_of_fused_layers_and_the_model_is_left_as_it_was():
    replaced = []

    def step(hook, rope, sequences):
        def count():
            return sum("forward" in vars(module) for module in hook.model.modules())

        before, stepper = count(), PiecewiseStepper(hook, sequences, rope, recorder=Replayed())
        during = count()
        stepper.finish()
        replaced.extend([before, during, count()])
        return BlockingStepper(hook, rope)

    run(tiny_model("llama"), "infllm", settings("infllm"), prompts(), 2, step=step)
    before, during, after = replaced
    assert during > before == after


LOOKING = ("deepseek_v4", "glm5_next", "qwen4_exp")
"""Families whose modules look at numbers to select."""


@pytest.fixture(scope="module")
def selecting(request):
    return tiny_model(request.param)


INDEXED = ("deepseek_v32", "glm_moe_dsa", "minimax_m3")


@pytest.mark.parametrize(("selecting", "name"), crossed(INDEXED, ["full", "native"]), indirect=["selecting"])
def test_layers_that_select_do_so_within_pieces(selecting, name, monkeypatch):
    """One sequence ends early, and no index key of the others is written anywhere but in its place."""
    monkeypatch.setattr(_numba, "numba", None)
    recorders, wanted = [], {"slots": 16} if name == "native" else {}

    def step(hook, rope, sequences):
        assert {gpu_step_of(type(each.method), each.method) for each in sequences} == {PIECEWISE}
        recorders.append(Replayed())
        return PiecewiseStepper(hook, sequences, rope, recorder=recorders[0])

    case = (selecting, name, wanted, prompts(), STEPS)
    free = run(*case)
    stop = next(token for token in free[0].token_ids[2:] if all(token not in each.token_ids for each in free[1:]))
    found, expected = run(*case, eos=(stop,), step=step), run(*case, eos=(stop,))
    assert len(expected[0].token_ids) < STEPS
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.counters.counts == other.counters.counts
        for layer in one.method.retrieval:
            assert torch.equal(one.method.attended(layer), other.method.attended(layer))
    assert len(recorders[0].pieces) == len(found[0].method.caches) + 1


@pytest.mark.parametrize("family", LOOKING)
def test_modules_that_look_at_numbers_stay_blocking(family):
    (sequence,) = run(tiny_model(of_this_version(family)), "native", {}, prompts()[1:2], 2)
    assert gpu_step_of(type(sequence.method), sequence.method) == BLOCKING
