"""Runs of a method on a model in memory, without files and console."""

from functools import cache

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from kvcli.capacity.planning.probe import WordlessTokenizer
from kvcli.methods import get_method
from kvcli.models.geometry import ModelGeometry, geometry_of, geometry_of_model
from kvcli.models.loading import Model
from kvcli.runtime.decode import BlockingStepper, decode
from kvcli.runtime.engine import engine
from kvcli.runtime.gpu.stepper import SlotStepper
from kvcli.runtime.sampling import Sampling
from kvcli.telemetry.timeline import Timeline

SPARE = 8  # extra tokens of room, for tests that go on by hand


class Written(str):
    """A config as it is written, which says what its model looks like; with the config itself."""

    config: PreTrainedConfig


@cache
def geometry_of_written(written: Written, dtype: torch.dtype) -> ModelGeometry:
    """Describe models of one form once, however many of them tests make."""
    return geometry_of(written.config, dtype)


def in_memory(module: PreTrainedModel) -> Model:
    """Wrap a transformers model as a loaded checkpoint."""
    written = Written(f"{type(module.config)} {module.config.to_json_string(use_diff=False)}")
    written.config = module.config
    geometry = geometry_of_model(module, geometry_of_written(written, module.dtype))
    return Model(module, WordlessTokenizer(), geometry, module.device, module.dtype, "tiny", "dummy")


def run(
    model: PreTrainedModel,
    name,
    settings,
    prompts,
    max_tokens,
    sampling=None,
    chunk=30,
    eos=(),
    streams=None,
    step=None,
    disk=None,
):
    """Continue every prompt (a list of token ids) greedily by `max_tokens`; return the finished sequences.

    With `streams` the steps run over slots, in these streams; `step` makes another kind of stepper from the hook, the
    rotary tables and the sequences. A `disk` (a `DiskTier`) holds what host memory is not to hold.
    """
    sampling = sampling or Sampling(max_tokens=max_tokens)
    sequences = []
    with engine(in_memory(model), [len(ids) + max_tokens + SPARE for ids in prompts], disk=disk) as ready:
        for index, ids in enumerate(prompts):
            context = ready.context(len(ids), max_tokens + SPARE)
            method = get_method(name)(get_method(name).Config(**settings), ready.layers, context)
            (logits,) = ready.prefill(ids, [method], chunk=chunk)
            sequence = ready.sequence(method, sampling, index=index, source=str(index), ids=ids)
            sequence.eos = eos
            sequence.accept(logits)
            sequences.append(sequence)
        if step is not None:
            stepper = step(ready.hook, ready.rope, sequences)
        elif streams is not None:
            stepper = SlotStepper(ready.hook, sequences, ready.rope, streams=streams)
        else:
            stepper = BlockingStepper(ready.hook, ready.rope)
        for _ in decode(stepper, sequences, Timeline()):
            pass
    return sequences


def index_on_host(method):
    """Return the bytes of host memory that a method uses for an index of the tokens, in addition to their KV."""
    return sum(cache.codes.nbytes for cache in method.caches if hasattr(cache, "codes"))
