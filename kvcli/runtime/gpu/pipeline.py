"""The attention handler of a batch over slots.

A sequence that has ended stays in its place with length 0, for which no kernel does anything, so that shapes and
addresses are the same at every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvcli.kernels.slot_attention import NewToken
from kvcli.kernels.softmax import Softmax
from kvcli.methods.base import AnyMethod
from kvcli.runtime.gpu.layers import PlainLayer, Scratch, SlotLayer, SpeculativeLayer
from kvcli.runtime.gpu.log import STEPS, Log, LoggedLayer
from kvcli.runtime.gpu.slots import BatchSlots
from kvcli.runtime.gpu.streams import Streams
from kvcli.runtime.gpu.synthetic import DecisionRates, SyntheticDecisionLayer, SyntheticDecisions

RECALL_STREAMS = 2
"""Streams that layers take in turns: one may still recall while the next selects."""


class SlotPipeline:
    """Serves a batch, one prefilled method object of `slot_rule` a sequence; takes their caches over.

    `lengths` are the tokens whose KV exists. `rates` are for measurements, see `kvcli.runtime.gpu.synthetic`.

    Raises:
        ValueError: the method cannot be served over slots.
    """

    def __init__(
        self,
        methods: Sequence[AnyMethod],
        lengths: Sequence[int],
        streams: Streams,
        rates: DecisionRates | None = None,
    ):
        rule = methods[0].slot_rule
        if rule is None:
            raise ValueError("this method cannot be served over slots")
        device = methods[0].context.tiers.device
        self.methods, self.rule, self.streams, self.rates = methods, rule, streams, rates
        self.first_lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.lengths = torch.zeros_like(self.first_lengths)
        self.running = torch.zeros_like(self.first_lengths)
        slots = [BatchSlots.of(caches, self.lengths) for caches in zip(*(m.caches for m in methods), strict=True)]
        retrieving = [_retrieving(layer, each) for layer, each in enumerate(slots) if each.host is not None]
        self.log = Log(retrieving if rule.correct_below else [], lengths, device)
        self.scratch: dict[tuple[Any, ...], Scratch] = {}
        self.forced: SyntheticDecisions | None = None
        self.layers = [self._layer(layer, each) for layer, each in enumerate(slots)]
        self.steps = self.counted = 0

    def start(self) -> None:
        """Let the sequences take part. A step before that changes nothing: it can be tried out."""
        self.lengths.copy_(self.first_lengths)
        self.running.fill_(1)
        self.log.start()

    def end(self, row: int) -> None:
        """Let a sequence take part no more."""
        self.lengths[row] = 0
        self.running[row] = 0

    def advance(self) -> None:
        """Begin a step: the newest token of every sequence counts."""
        self.lengths.add_(self.running)
        if self.forced is not None:
            self.forced.advance(self.lengths)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """Attend with one token a sequence: q [b, H, 1, d], k and v [b, Hk, 1, d] -> [b, 1, H, d]."""
        new = NewToken(*(x[:, :, 0].contiguous() for x in (k, v)))  # parts of a fused projection have gaps
        return self.layers[layer](q[:, :, 0], new, softmax)[:, None]

    def settle(self) -> None:
        """End a step: everything in every stream is done, and what was found is kept."""
        self.streams.join()
        self.log.take()

    def count(self) -> None:
        """Count what the steps so far found; to be called every `STEPS` steps and at the end. Waits for the device."""
        self.log.count([method.context.counters for method in self.methods], range(self.counted, self.steps))
        self.counted = self.steps

    def stepped(self) -> None:
        """Say that a step was run."""
        self.steps += 1
        if self.steps - self.counted == STEPS:
            self.count()

    def _layer(self, layer: int, slots: BatchSlots) -> SlotLayer:
        if layer not in self.log.found:
            return PlainLayer(slots)
        stream = f"recall {layer % RECALL_STREAMS}"
        scratch = self._scratch("correction", slots), self._scratch(stream, slots)
        threshold = self.rule.correct_below[layer]
        parts = (slots, self.rule, threshold, self.log.found[layer], self.streams, stream, scratch)
        if self.rates is None:
            return SpeculativeLayer(*parts)
        if self.forced is None:
            num_layers, num_kv_heads = len(self.methods[0].caches), slots.rows.k.shape[1]
            self.forced = SyntheticDecisions(
                self.rates, num_layers, num_kv_heads, slots.rows.layout, self.first_lengths
            )
        told = SyntheticDecisionLayer(*parts)
        told.follow(self.forced, layer)
        return told

    def _scratch(self, stream: str, slots: BatchSlots) -> Scratch:
        assert slots.bounds is not None
        key = (stream, slots.bounds.shape[:3])
        if key not in self.scratch:
            self.scratch[key] = Scratch(slots)
        return self.scratch[key]


def _retrieving(layer: int, slots: BatchSlots) -> LoggedLayer:
    _, num_kv_heads, _, d = slots.rows.k.shape
    layout = slots.rows.layout
    block_bytes = 2 * layout.size * d * slots.rows.k.element_size()
    return LoggedLayer(layer, num_kv_heads, layout.selected, layout.size, block_bytes)
