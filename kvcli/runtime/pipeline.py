"""Choose how the steps of a batch run."""

from collections.abc import Callable, Sequence
from typing import Literal

from kvcli.methods.card import GRAPH, gpu_step_of
from kvcli.methods.contract import AnyMethod
from kvcli.models.rope import Rope
from kvcli.runtime.attention_hook import Hook
from kvcli.runtime.decode import BlockingStepper, Stepper
from kvcli.runtime.gpu.piecewise import PiecewiseStepper
from kvcli.runtime.gpu.stepper import SlotStepper
from kvcli.runtime.lossless import LosslessStepper
from kvcli.runtime.sequence import RunningSequence

Pipeline = Literal["blocking", "overlapped"]
"""How a step runs: phase after phase; or on a GPU as `gpu_step_of` its method says (`kvcli.runtime.gpu`), where phases
are neither watched nor timed.
"""


def stepper_for(
    hook: Hook,
    rope: Rope,
    sequences: Sequence[RunningSequence],
    pipeline: Pipeline,
    notice: Callable[[str], None],
    rows: int = 1,
    lossless: int | None = None,
) -> Stepper:
    """Make the stepper of these sequences; parameters as in `kvcli.runtime.engine.Engine.decode`."""
    if lossless is not None:
        return LosslessStepper(hook, rope, sequences, lossless)
    if pipeline == "blocking":
        return BlockingStepper(hook, rope, rows)
    methods = [each.method for each in sequences]
    if all(gpu_step_of(type(method), method) == GRAPH for method in methods) and alike(methods):
        return SlotStepper(hook, sequences, rope, notice)
    return PiecewiseStepper(hook, sequences, rope, notice)


def alike(methods: Sequence[AnyMethod]) -> bool:
    """Tell whether all have the same settings: a budget that is a share differs from prompt to prompt."""
    return all(method.config == methods[0].config for method in methods)
