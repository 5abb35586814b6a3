"""Models some of whose layers keep a state: what they continue is what transformers generates, however they are run."""

import json

import pytest
import torch
from engine import in_memory, profile_of, run

from kvcli.conformance.models import HYBRIDS, VOCAB, tiny_model
from kvcli.conformance.test_method import AMPLE, SMALL, settings
from kvcli.memory.state import capture
from kvcli.methods import get_method
from kvcli.runtime.checkpoint.restoring import Restoring
from kvcli.runtime.decode import BlockingStepper, decode
from kvcli.runtime.engine import engine
from kvcli.runtime.gpu.piecewise import PiecewiseStepper
from kvcli.runtime.gpu.recorder import SerialStreams
from kvcli.runtime.prefill import Branches
from kvcli.runtime.sampling import Sampling
from kvcli.telemetry.timeline import Timeline

PROMPT, STEPS, CHUNK = 75, 12, 30


def prompt(seed, length=PROMPT):
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def generated(model, ids, steps=STEPS):
    out = model.generate(torch.tensor([ids]), max_new_tokens=steps, do_sample=False, eos_token_id=None)
    return out[0, len(ids) :].tolist()


@pytest.fixture(scope="module", params=HYBRIDS)
def hybrid(request):
    """A family's model, and what transformers generates after a prompt."""
    model = tiny_model(request.param)
    return model, generated(model, prompt(1))


def new_method(ready, name, wanted, tokens):
    config = get_method(name).Config(**settings(name, {**wanted, **get_method(name).exact}))
    return get_method(name)(config, ready.layers, ready.context(tokens, STEPS))


def sequence_of(ready, method, logits, steps=STEPS):
    sequence = ready.sequence(method, Sampling(max_tokens=steps))
    sequence.eos = ()
    sequence.accept(logits)
    return sequence


def finished(ready, sequences, rows=1):
    for _ in decode(BlockingStepper(ready.hook, ready.rope, rows), sequences, Timeline()):
        pass
    return [sequence.token_ids for sequence in sequences]


def test_a_batch_of_different_lengths_is_the_runs_of_one(hybrid):
    model, _ = hybrid
    prompts = [prompt(4), prompt(5, 31), [7]]
    steps = [4, STEPS, 9]  # the first ones leave the others
    with engine(in_memory(model), [len(ids) + STEPS for ids in prompts]) as ready:
        sequences = []
        for ids, count in zip(prompts, steps, strict=True):
            method = new_method(ready, "quest", AMPLE, len(ids))
            (logits,) = ready.prefill(ids, [method], chunk=CHUNK)
            sequences.append(sequence_of(ready, method, logits, count))
        tokens = finished(ready, sequences, rows=4)
    assert tokens == [generated(model, ids, count) for ids, count in zip(prompts, steps, strict=True)]


def test_prompts_that_begin_alike_part_and_forks_go_their_ways(hybrid):
    model, _ = hybrid
    common = prompt(6, 50)
    prompts = [common + prompt(seed, length) for seed, length in ((7, 20), (8, 1), (9, 35))]
    with engine(in_memory(model), [len(common) + 35 + STEPS]) as ready:
        methods = [[new_method(ready, "freekv", AMPLE, len(common) + 35)] for _ in prompts]
        read = ready.prefill_branches(Branches.of(prompts, len(common)), methods, chunk=CHUNK)
        for (method,), ids in zip(methods, prompts, strict=True):
            method.context.prompt_tokens = len(ids)
        sequences = [sequence_of(ready, *row, *logits) for row, logits in zip(methods, read, strict=True)]
        fork = sequences[0].method.fork(sequences[0].method.context.counters, "fork")
        other = sequence_of(ready, fork, read[0][0])
        other.token_ids[0] = 5  # goes on differently
        tokens = finished(ready, [*sequences, other])
    assert tokens[:-1] == [generated(model, ids) for ids in prompts]
    assert tokens[-1][1:] == generated(model, [*prompts[0], 5], STEPS - 1)


def test_over_slots_and_in_pieces_states_go_on_as_in_the_blocking_pipeline(hybrid):
    model, _ = hybrid
    given = model, "freekv", settings("freekv", SMALL), [prompt(4), prompt(5, 41)], STEPS
    blocking, slots, pieces = (
        [sequence.token_ids for sequence in run(*given, chunk=CHUNK, **pipeline)]
        for pipeline in (
            {},
            {"streams": SerialStreams()},
            {"step": lambda hook, rope, sequences: PiecewiseStepper(hook, sequences, rope)},
        )
    )
    assert slots == pieces == blocking


def test_steps_that_are_tried_out_leave_the_states_as_they_were(hybrid):
    model, reference = hybrid
    with engine(in_memory(model), [PROMPT + STEPS]) as ready:
        ready.method(profile_of("infinigen", {}), ready.context(PROMPT, STEPS))  # which knows the form of its queries
        method = new_method(ready, "full", {}, PROMPT)
        (logits,) = ready.prefill(prompt(1), [method], chunk=CHUNK)
        sequence = sequence_of(ready, method, logits)
        stepper = PiecewiseStepper(ready.hook, [sequence], ready.rope)
        where = [tensor.data_ptr() for tensors in method.states.layers for tensor in tensors.values()]
        with torch.inference_mode(), stepper.states.untouched():
            stepper._run()
        for _ in decode(stepper, [sequence], Timeline()):
            pass
    assert sequence.token_ids == reference
    assert where == [tensor.data_ptr() for tensors in method.states.layers for tensor in tensors.values()]


def test_a_sequence_goes_on_from_its_state(hybrid):
    model, reference = hybrid
    with engine(in_memory(model), [PROMPT + STEPS]) as ready:
        methods = [new_method(ready, "quest", AMPLE, PROMPT) for _ in range(3)]
        logits = ready.prefill(prompt(1), methods[:2], chunk=CHUNK)
        batch = [sequence_of(ready, *pair) for pair in zip(methods, logits, strict=False)]
        stepper = BlockingStepper(ready.hook, ready.rope)
        for _ in range(STEPS // 2):
            for sequence, row in zip(batch, stepper.step(batch), strict=True):
                sequence.counters.next_step()
                sequence.accept(*row)
        state = capture([batch[1]])
        resumed = ready.sequence(methods[2], Sampling(max_tokens=STEPS))
        resumed.eos = ()
        restoring = Restoring([resumed], json.loads(json.dumps(state.tree)), resumed.method.context.tiers)
        for part in (*state.added, *state.changing):
            restoring.put(part)
        restoring.finish()
        assert finished(ready, [resumed]) == [reference]
