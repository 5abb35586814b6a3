"""The engine without files and console: run a method on a model in memory."""

from contextlib import nullcontext

import torch
from transformers import PreTrainedModel

from kvcli.methods import get_method
from kvcli.methods.base import SequenceContext
from kvcli.models.geometry import geometry_of
from kvcli.models.rope import installed
from kvcli.runtime.attention_hook import attached
from kvcli.runtime.decode import BlockingStepper, decode
from kvcli.runtime.detokenizer import StreamingDetokenizer
from kvcli.runtime.gpu.stepper import SlotStepper
from kvcli.runtime.sampling import Sampler, Sampling
from kvcli.runtime.sequence import RunningSequence
from kvcli.runtime.windowed import read_prompt
from kvcli.store.cache import Tiers
from kvcli.telemetry.counters import Counters
from kvcli.telemetry.timeline import Timeline

SPARE = 8  # tokens of room beyond the run, for tests that go on by hand


class NoText:
    """A tokenizer that spells nothing."""

    def decode(self, ids, **_):
        return ""


def new_method(name, settings, layers, capacity, dtype=torch.float32, rotary=None, device="cpu", **known):
    """Make a method object; `known` goes into its `SequenceContext` besides."""
    method = get_method(name)
    context = SequenceContext(
        capacity=capacity,
        tiers=Tiers.for_device(torch.device(device), dtype),
        counters=Counters(len(layers)),
        timeline=Timeline(),
        rotary=rotary or [None] * len(layers),
        **known,
    )
    return method(method.Config(**settings), layers, context)


def run(
    model: PreTrainedModel,
    name,
    settings,
    prompts,
    max_tokens,
    sampling=None,
    chunk=7,
    rotary=None,
    eos=(),
    streams=None,
):
    """Continue every prompt (a list of token ids) greedily by `max_tokens`; returns the finished sequences.

    `rotary` is for callers that have installed their own tables. `streams` runs the steps over slots, in these streams.
    """
    layers = geometry_of(model.config, model.dtype).layers
    sampling = sampling or Sampling(max_tokens=max_tokens)
    sequences = []
    capacities = [len(ids) + max_tokens + SPARE for ids in prompts]
    with attached(model) as hook, installed(model, capacities) if rotary is None else nullcontext() as rope:
        for index, (ids, capacity) in enumerate(zip(prompts, capacities, strict=True)):
            if rope is not None:
                rope.use([capacity])
            own = rotary if rope is None else rope.rotary(capacity)
            method = new_method(name, settings, layers, capacity, model.dtype, own, prompt_tokens=len(ids))
            (logits,) = read_prompt(model, hook, ids, [method], layers, lambda _: None, chunk)
            sequence = RunningSequence(
                index=index,
                source=str(index),
                sample=0,
                prompt_tokens=len(ids),
                method=method,
                counters=method.context.counters,
                sampler=Sampler(sampling, 0, torch.device("cpu")),
                stream=StreamingDetokenizer(NoText()),
                eos=eos,
                max_tokens=max_tokens,
                prefill_ms=0.0,
            )
            sequence.accept(logits)
            sequences.append(sequence)
        if streams is None:
            stepper = BlockingStepper(model, hook, rope)
        else:
            stepper = SlotStepper(model, hook, sequences, rope, streams=streams)
        for _ in decode(stepper, sequences, Timeline()):
            pass
    return sequences
