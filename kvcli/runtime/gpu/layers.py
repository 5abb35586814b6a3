"""What one layer of a batch does at a step, over slots.

Shapes: q [b, H, d], the new token's k and v [b, Hk, d] -> out [b, H, d]. The caller uses the tensors again afterwards.

Three streams work on a layer that speculates, and on nothing at once, because

    slots and page table   belong to a KV head, and a head is either corrected, all in one stream, or attends on the
                           main stream and is recalled for after that (`attended`)
    the newest token's row is written by its head's attention; the page that it fills is summarised and written out
                           after both attentions (`attended`, `corrected`)
    that page              is in the window: it is neither scored nor recalled before the next step
    q, k, v, out           are read last in the correction stream, which the layer waits for; the recall stream reads
                           the queries' copy, which is written again at the next step
    scores and selection   are each stream's own, layer after layer
    the log                is read after the step has joined its streams

and the next step begins when all streams of this one are done.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.page_scores import page_scores_device
from kvcli.kernels.page_summary import summarise_filled_page
from kvcli.kernels.query_similarity import Decision, correct_heads
from kvcli.kernels.resolve_pages import MissList, resolve_pages_device
from kvcli.kernels.slot_attention import NewToken, slot_attention
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.topk import topk_pages_device
from kvcli.kernels.write_page import write_filled_page
from kvcli.runtime.gpu.log import LayerStepStats
from kvcli.runtime.gpu.recall import Recall, recall_of
from kvcli.runtime.gpu.slots import BatchSlots
from kvcli.runtime.gpu.streams import Streams
from kvcli.store.layer_slots import SlotRule


class SlotLayer(Protocol):
    """One layer's part of a step."""

    def __call__(self, q: Tensor, new: NewToken, softmax: Softmax) -> Tensor:
        """Append the newest token of every sequence and attend."""


class PlainLayer(SlotLayer):
    """Attends to all that its slots hold."""

    def __init__(self, slots: BatchSlots):
        self.rows = slots.rows

    @override
    def __call__(self, q: Tensor, new: NewToken, softmax: Softmax) -> Tensor:
        out = torch.empty_like(q)
        slot_attention(q, self.rows, softmax, out, new)
        return out


class Scratch:
    """Room for one layer's scores and selection; layers whose work follows one another in a stream can share it."""

    def __init__(self, slots: BatchSlots):
        assert slots.bounds is not None
        b, num_kv_heads, num_pages = slots.bounds.shape[:3]
        k, device = slots.rows.layout.selected, slots.bounds.device
        self.scores = torch.empty(b, num_kv_heads, num_pages, dtype=torch.float32, device=device)
        self.selected = torch.empty(b, num_kv_heads, k, dtype=torch.int32, device=device)


class SpeculativeLayer(SlotLayer):
    """FreeKV's step: most heads attend to what the step before selected, the others select and recall first.

    Three streams. On the main one the queries are compared, and the heads that reuse attend. Beside it, in
    `correction`, the heads that turned too far select, recall and attend; the layer waits for them. In a recall stream
    the heads that reused select and recall for the next step, once attention has read their slots; the step waits for
    that at its end. A stream with nothing to do costs the launches of kernels that return at once: the host
    is not asked.
    """

    def __init__(
        self,
        slots: BatchSlots,
        rule: SlotRule,
        threshold: float,
        found: LayerStepStats,
        streams: Streams,
        stream: str,
        scratch: tuple[Scratch, Scratch],
    ):
        assert slots.bounds is not None
        assert slots.host is not None
        self.rows, self.bounds, self.host = slots.rows, slots.bounds, slots.host
        self.rule, self.streams, self.stream = rule, streams, stream
        self.recall: Recall = recall_of(rule)
        self.threshold = threshold  # query cosine
        b, num_kv_heads, k = found.turn.shape[0], found.turn.shape[1], slots.rows.layout.selected
        device = self.bounds.device
        flags = torch.zeros(3, b, num_kv_heads, dtype=torch.bool, device=device)
        self.waiting, self.others, self.reusing = flags  # what the streams go by
        self.decision = Decision(self.waiting, self.others, self.reusing, found.turn, torch.zeros_like(found.turn))
        self.query = torch.empty(0)  # [b, H, d] of the last step that retrieved
        pages, into = torch.empty(2, 2, b, num_kv_heads, k, dtype=torch.int32, device=device)
        self.now = MissList(pages[0], into[0], found.missed_now)
        self.later = MissList(pages[1], into[1], found.missed_later)
        self.scratch_now, self.scratch_later = scratch

    @override
    def __call__(self, q: Tensor, new: NewToken, softmax: Softmax) -> Tensor:
        out = torch.empty_like(q)
        if self.query.numel() == 0:
            self.query = torch.zeros_like(q, memory_format=torch.contiguous_format)
        self.decide(q)
        decided = self.streams.mark()

        def correct() -> None:
            self.bring(self.waiting, self.now, self.scratch_now, softmax)
            slot_attention(q, self.rows, softmax, out, new, self.waiting)

        corrected = self.streams.submit("correction", correct, [decided])
        slot_attention(q, self.rows, softmax, out, new, self.others)
        attended = self.streams.mark()

        def prepare() -> None:
            summarise_filled_page(self.rows, self.bounds)
            write_filled_page(self.rows, self.host)
            self.bring(self.reusing, self.later, self.scratch_later, softmax)

        self.streams.submit(self.stream, prepare, [attended, corrected])
        self.streams.wait(corrected)
        return out

    def decide(self, q: Tensor) -> None:
        """Say which heads wait, and keep the queries: `q` is the caller's again before all streams have read it."""
        pooling = self.rule.correction_pooling
        correct_heads(q, self.query, self.rows.lengths, self.rows.layout, self.threshold, pooling, self.decision)

    def bring(self, heads: Tensor, misses: MissList, scratch: Scratch, softmax: Softmax) -> None:
        """Select for `heads` [b, Hk], make the page table say so, and recall what is missing."""
        assert self.rows.resident is not None
        resolve_pages_device(self.rows.resident, self.select(heads, scratch, softmax), misses, heads)
        self.recall(self.host, misses, self.rows)

    def select(self, heads: Tensor, scratch: Scratch, softmax: Softmax) -> Tensor:
        """Choose pages [b, Hk, k] for `heads` with the queries of this step."""
        rows, scale = self.rows, softmax.scale if self.rule.score_scale else 1.0
        scored = (rows.lengths, rows.layout)
        page_scores_device(self.query, self.bounds, *scored, scale, self.rule.pooling, scratch.scores, heads)
        topk_pages_device(scratch.scores, *scored, scratch.selected, heads)
        return scratch.selected
