"""The decode loop: a generator of steps, one token for every running sequence in each.

`BlockingPipeline` defines what a step attends to: the sequences one after another, each phase finished before the next
begins. `kvcli.runtime.gpu` overlaps the phases.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels._numba import compiling
from kvcli.kernels.narrow_attention import ChainTokens
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.speculation import Pages, Speculated
from kvcli.kv.selected import SelectingCache
from kvcli.methods.card import BLOCKING
from kvcli.methods.contract import AnyMethod
from kvcli.models.rope import Rope
from kvcli.runtime.attention_hook import Hook
from kvcli.runtime.next_query import next_queries
from kvcli.runtime.recurrent import BatchStates
from kvcli.runtime.sequence import RunningSequence
from kvcli.telemetry.timeline import Timeline


class BlockingPipeline:
    """The handler during decode: each sequence of the batch attends by its own method object.

    If there are more rows than methods, the last method's output is repeated.
    """

    room = None

    def __init__(self, methods: Sequence[AnyMethod]):
        self.methods = methods

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """Attend with one token per sequence: q [b, H, 1, d], k and v [b, Hk, 1, d] -> [b, 1, H, d]."""
        q, k, v = q.select(2, 0), k.select(2, 0), v.select(2, 0)
        outs = [
            method.attend(layer, q[row], k[row], v[row], softmax.of(row))  # [H, d]
            for row, method in enumerate(self.methods)
        ]
        return self._stacked(outs, len(q))

    def read(self, layer: int, q: Tensor, softmax: Softmax) -> Tensor:
        """Attend with one token per sequence to KV that `layer` has: q [b, H, 1, d] -> [b, 1, H, d]."""
        outs = [method.attend_to(layer, q[row, :, 0], softmax) for row, method in enumerate(self.methods)]
        return self._stacked(outs, len(q))

    def in_chain(self, softmax: Sequence[Softmax]) -> Sequence[tuple[ChainTokens, Pages | None]] | None:
        """Return what a step attends to in every layer, if there is one sequence and its step can be one loop."""
        return self.methods[0].in_chain(softmax) if len(self.methods) == 1 else None

    def take_rows(self, found: Sequence[Speculated | None]) -> None:
        """Count the token that was written to its row in every layer, and take what speculation found there."""
        self.methods[0].take_rows(found)

    def _stacked(self, outs: list[Tensor], rows: int) -> Tensor:
        """Stack the outputs [H, d] of all methods into rows [b, 1, H, d]."""
        if rows == 1:
            return outs[0][None, None]
        return torch.stack([*outs, *outs[-1:] * (rows - len(outs))])[:, None]

    def index(self, layer: int, keys: Tensor) -> Sequence[Tensor]:
        """Return each sequence's index keys [n + 1, c] of its tokens; `keys` [b, 1, c] are those of the newest ones."""
        caches = [cast(SelectingCache, method.caches[layer]) for method in self.methods]
        found = [cache.index(new) for cache, new in zip(caches, keys, strict=False)]
        return found + found[-1:] * (len(keys) - len(found))

    def apart(self) -> Sequence[BlockingPipeline]:
        """Return a handler for each sequence."""
        return [BlockingPipeline([method]) for method in self.methods]


class Stepper(ABC):
    """Runs decode steps of a batch."""

    @property
    def ran_by(self) -> str:
        """The kind of step, found when steps were tried out: see `kvcli.methods.card`."""
        return BLOCKING

    @abstractmethod
    def step(self, batch: Sequence[RunningSequence]) -> Sequence[tuple[Tensor, int | None]]:
        """Run the newest token of every sequence through the model.

        Returns for each the logits [vocab] of its next token, and that token if it was chosen already. A sequence that
        was left out once never comes back.
        """

    def finish(self) -> None:  # noqa: B027 - most have nothing to end
        """End: the counters of the sequences now hold everything that was counted."""


class BlockingStepper(Stepper):
    """Steps by `BlockingPipeline`; `rope` has the tables of the model's rotary positions.

    A step has at least `rows` rows, the last one repeated if there are fewer sequences: matrix products with another
    number of rows may round differently, and a sequence's result would depend on its company.
    """

    def __init__(self, hook: Hook, rope: Rope, rows: int = 1):
        self.hook, self.rope, self.rows = hook, rope, rows
        self.states = BatchStates((), ())

    @override
    @torch.inference_mode()
    def step(self, batch: Sequence[RunningSequence]) -> Sequence[tuple[Tensor, int | None]]:
        methods, tokens = [sequence.method for sequence in batch], [sequence.token_ids[-1] for sequence in batch]
        return [(row, None) for row in self.run(methods, tokens, [sequence.length for sequence in batch])]

    def run(self, methods: Sequence[AnyMethod], tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Run a token for each method, at its position -> logits [b, vocab] of the next ones."""
        device, more = self.hook.model.device, max(0, self.rows - len(methods))
        ids, places = (
            torch.tensor([[each] for each in [*row, *[row[-1]] * more]], device=device) for row in (tokens, positions)
        )  # [b, 1] each
        rows = [*methods, *[methods[-1]] * more]
        self.rope.use([method.context.capacity for method in rows])
        held = [method.states for method in rows]
        if not self.states.of(held):
            self.states = BatchStates(self.hook.geometry.states, held)
        with next_queries(self.hook, methods):
            logits = self.hook.run(BlockingPipeline(methods), ids, places, 1, self.states)  # [b, 1, vocab]
        return logits[: len(methods), 0]


def decode(
    stepper: Stepper, sequences: Sequence[RunningSequence], timeline: Timeline
) -> Iterator[list[tuple[RunningSequence, str]]]:
    """Continue sequences until each has ended; yield every step's sequences with their new text.

    A sequence that ends leaves the batch. If the stepper allows it, others may be added to `sequences` between two
    steps. Every sequence brings its first token, chosen from the prefill. The time in which loops are compiled counts
    apart from the steps.
    """
    step = 0
    try:
        while batch := [sequence for sequence in sequences if sequence.running]:
            started, compiled = time.perf_counter(), compiling.seconds
            with timeline.span("step", index=step, batch=len(batch)):
                for sequence in batch:
                    sequence.counters.next_step()
                rows = stepper.step(batch)
                with timeline.span("sampling"):
                    pieces = [sequence.accept(*row) for sequence, row in zip(batch, rows, strict=True)]
            compile_ms = 1000 * (compiling.seconds - compiled)
            elapsed = 1000 * (time.perf_counter() - started) - compile_ms
            for sequence in batch:
                sequence.decode_ms.append(elapsed)
                sequence.compile_ms += compile_ms
            done = [list(zip(batch, pieces, strict=True))]
            del batch, sequence, rows
            yield done.pop()  # the loop keeps no reference to a sequence that has ended
            step += 1
    finally:
        stepper.finish()
