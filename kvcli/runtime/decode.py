"""The decode loop: one token for every running sequence a step, as a generator of steps.

`BlockingPipeline` is the reference for what a step attends to: the sequences one after another, each phase finished
before the next begins. `kvcli.runtime.gpu` overlaps the phases.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcli.kernels.softmax import Softmax
from kvcli.methods.base import Method
from kvcli.models.rope import Rope
from kvcli.runtime.attention_hook import Hook
from kvcli.runtime.next_query import next_queries
from kvcli.runtime.sequence import RunningSequence
from kvcli.telemetry.timeline import Timeline


class DecodingSequence(Protocol):
    """One sequence of a batch, as far as a step of the model needs it; a `RunningSequence` is one."""

    @property
    def method(self) -> Method[Any, Any]:
        """What serves it."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Its tokens after the prompt, the last of which has no KV yet."""

    @property
    def length(self) -> int:
        """Tokens that have."""


class BlockingPipeline:
    """The handler during decode: each sequence of the batch by its own method object."""

    def __init__(self, methods: Sequence[Method[Any, Any]]):
        self.methods = methods

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """Attend with one token a sequence: q [b, H, 1, d], k and v [b, Hk, 1, d] -> [b, 1, H, d]."""
        outs = [
            method.attend(layer, q[row, :, 0], k[row, :, 0], v[row, :, 0], softmax)  # [H, d]
            for row, method in enumerate(self.methods)
        ]
        return torch.stack(outs)[:, None]


@torch.inference_mode()
def forward_step(
    model: PreTrainedModel, hook: Hook, batch: Sequence[DecodingSequence], rope: Rope | None = None
) -> Tensor:
    """Run the newest token of every sequence through the model -> logits [b, vocab].

    `rope` is what stands in for the model's rotary module, where something does.
    """
    if rope is not None:
        rope.use([sequence.method.context.capacity for sequence in batch])
    methods = [sequence.method for sequence in batch]
    hook.handler = BlockingPipeline(methods)
    tokens = torch.tensor([[sequence.token_ids[-1]] for sequence in batch], device=model.device)  # [b, 1]
    positions = torch.tensor([[sequence.length] for sequence in batch], device=model.device)  # [b, 1]
    with next_queries(hook, methods):
        out = model(input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=1)
    return out.logits[:, -1]  # type: ignore[no-any-return]


class Stepper(Protocol):
    """Runs decode steps of a batch."""

    def step(self, batch: Sequence[RunningSequence]) -> Sequence[tuple[Tensor, int | None]]:
        """Run the newest token of every sequence through the model.

        Gives for each the logits [vocab] of its next token, and that token where it was chosen already. A sequence
        that was left out once never comes back.
        """

    def finish(self) -> None:
        """End: all that was counted is in the counters of the sequences."""


class BlockingStepper:
    """Steps by `BlockingPipeline`."""

    def __init__(self, model: PreTrainedModel, hook: Hook, rope: Rope | None):
        self.model, self.hook, self.rope = model, hook, rope

    def step(self, batch: Sequence[RunningSequence]) -> Sequence[tuple[Tensor, int | None]]:
        """See `Stepper.step`."""
        return [(logits, None) for logits in forward_step(self.model, self.hook, batch, self.rope)]

    def finish(self) -> None:
        """See `Stepper.finish`."""


def decode(
    stepper: Stepper, sequences: Sequence[RunningSequence], timeline: Timeline
) -> Iterator[list[tuple[RunningSequence, str]]]:
    """Continue sequences until each has ended; yields every step's sequences with their new text.

    A sequence that ends leaves the batch. Every sequence brings its first token, chosen from the prefill.
    """
    step = 0
    try:
        while batch := [sequence for sequence in sequences if sequence.running]:
            started = time.perf_counter()
            with timeline.span("step", index=step, batch=len(batch)):
                for sequence in batch:
                    sequence.counters.next_step()
                rows = stepper.step(batch)
                with timeline.span("sampling"):
                    pieces = [sequence.accept(*row) for sequence, row in zip(batch, rows, strict=True)]
            elapsed = 1000 * (time.perf_counter() - started)
            for sequence in batch:
                sequence.decode_ms.append(elapsed)
            yield list(zip(batch, pieces, strict=True))
            step += 1
    finally:
        stepper.finish()
