"""Run one layer of a batch in a step, over slots, by any plan (`kvcli.methods.step`).

Shapes: q [b, H, d], the new token's k and v [b, Hk, d] -> out [b, H, d]. The caller reuses the tensors afterwards.
Three streams work on a layer without ever touching the same data at once, because

    slots and page table   belong to a KV head, and a head that chooses after attention is either corrected, all in one
                           stream, or attends on the main stream and is recalled for after that (`attended`); if all
                           heads choose before attention, the main stream does both
    the newest token's row is written by its head's attention, or before it; a page or block that it completes is
                           indexed and written out after all attention (`attended`, `corrected`), unless scores need
                           it before
    that page              is in the window: it is neither scored nor recalled before the next step
    q, k, v, out           are read last in the correction stream, which the layer waits for; the recall stream reads
                           the queries' copy, which is written again at the next step
    scores and selection   are each stream's own, layer after layer
    the log                is read after the step has joined its streams

and the next step begins when all streams of this one are done.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.append import NewToken, append_token
from kvcli.kernels.page_table import MissList, PagedKV, SlotLayout, selected_count
from kvcli.kernels.paged_attention import can_bring, paged_decode_attention
from kvcli.kernels.query_similarity import Decision, Turn, correct_heads
from kvcli.kernels.recall import Missing
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.topk import Selection
from kvcli.kv.cache import LayerSlots
from kvcli.methods.step import BatchSlots, Best, Choice, Chosen, Correction, FromHost, StepIndex, StepPlan
from kvcli.runtime.gpu.recall import Gather, recall_of
from kvcli.runtime.gpu.recorder import Point, Streams
from kvcli.telemetry.counters import Count, Counters

# The results of a pipeline's steps, kept on the device and read once in a while into the counters.

STEPS = 16
"""Steps between two readings; a reading comes when the host waits for a step anyway, and copies little."""


class LayerStepStats(NamedTuple):
    """A layer's results in a step, for every KV head [b, Hk]: its turn, its misses before and after attention, and the
    number of pages it requested, if that varies.
    """

    turn: Tensor
    missed_now: Tensor
    missed_later: Tensor
    asked: Tensor


@dataclass(frozen=True)
class LoggedLayer:
    """A layer that chooses: KV heads, the layout of its choice, bytes of a page of one head in host memory.

    It writes a page to host memory whenever one fills, in the sequences in which it `writes`. A layer that `speculates`
    chooses as its `turn` says, others at every step of a sequence that has at least `active_from` tokens.
    """

    layer: int
    num_kv_heads: int
    layout: SlotLayout
    active_from: tuple[int, ...]
    block_bytes: int
    writes: tuple[bool, ...]
    speculates: bool
    varies: bool

    @property
    def size(self) -> int:
        """Numbers that each of its KV heads logs in a step: none if everything follows from lengths."""
        return len(LayerStepStats._fields) if self.block_bytes else 0


class AlikeLayers:
    """Layers that differ by their number alone, so that their results are counted together."""

    def __init__(self, layers: Sequence[LoggedLayer], batch: int):
        self.of, self.layers = layers[0], [layer.layer for layer in layers]
        self.shape = len(layers), self.of.size, batch, self.of.num_kv_heads
        self.by_head: dict[Count, Tensor] = {}  # [layers, b, Hk] each: sums that the counters do not have yet

    def amounts(self, part: Tensor, lengths: Tensor, timed: Tensor) -> Tensor:
        """Count what was logged [steps, ..] after steps with these lengths [steps, b]: [b, steps, layers, Count].

        Sums by head take in the steps of the sequences that are `timed` [steps, b].
        """
        steps, (layers, size, b, heads) = len(lengths), self.shape
        if size:
            found = LayerStepStats(*part.view(steps, *self.shape).unbind(2))  # [steps, layers, b, Hk] each
        else:
            found = LayerStepStats(
                *torch.zeros(len(LayerStepStats._fields), steps, layers, b, heads, dtype=torch.int32)
            )
        counts = _by_head(self.of, found, lengths[:, None])
        for count, of_heads in counts.items():
            sums = (of_heads * timed[:, None, :, None]).sum(0)
            self.by_head[count] = self.by_head[count] + sums if count in self.by_head else sums
        return _amounts(self.of, counts, found, lengths[:, None]).permute(2, 0, 1, 3)


class Log:
    """Steps of b sequences, in the layers that choose; layers write the results of the present step to `found`.

    The device keeps the last `STEPS` steps. `read` copies them to the host, where `count` takes them in, any number at
    once: what counts one step at every step never makes the device wait.
    """

    def __init__(self, layers: Sequence[LoggedLayer], lengths: Sequence[int], device: torch.device):
        alike: dict[LoggedLayer, list[LoggedLayer]] = {}
        for layer in layers:
            alike.setdefault(replace(layer, layer=0), []).append(layer)
        self.groups = [AlikeLayers(group, len(lengths)) for group in alike.values()]
        self.lengths = torch.tensor(lengths)
        self.sizes = [math.prod(group.shape) for group in self.groups]
        self.present = torch.zeros(sum(self.sizes), dtype=torch.int32, device=device)
        self.found = {
            layer: LayerStepStats(*own)
            for group, part in zip(self.groups, torch.split(self.present, self.sizes), strict=True)
            for layer, own in zip(group.layers, part.view(group.shape), strict=True)
            if group.of.size
        }
        self.steps = torch.zeros(STEPS, len(self.present), dtype=torch.int32, device=device)
        self.next = torch.zeros(1, dtype=torch.int64, device=device)
        self.rows, self.first = torch.zeros(0, len(self.present), dtype=torch.int32), 0  # on the host, from a step on

    @property
    def keeps(self) -> bool:
        """Whether a step logs anything."""
        return len(self.present) > 0

    def missed(self) -> Iterator[tuple[list[int], Tensor]]:
        """Yield layers that are alike, and where they log their misses before and after attention: [.., 2, b, Hk]."""
        for group, part in zip(self.groups, torch.split(self.present, self.sizes), strict=True):
            if group.of.size:
                first = LayerStepStats._fields.index("missed_now")
                yield group.layers, part.view(group.shape)[:, first : first + 2]

    def start(self) -> None:
        """Begin with step 0; forget what was tried out before."""
        self.next.zero_()

    def take(self) -> None:
        """Keep the results of this step; the work is the same at every step, so that a graph can capture it."""
        if self.keeps:
            self.steps.index_copy_(0, self.next, self.present[None])
            self.next.add_(1).remainder_(STEPS)

    def read(self, steps: range) -> None:
        """Copy these of the last steps to the host; no multiple of `STEPS` lies within them. Waits for the device."""
        start = steps.start % STEPS
        self.rows, self.first = self.steps[start : start + len(steps)].to("cpu", copy=True), steps.start

    def count(self, counters: Sequence[Counters], steps: range) -> None:
        """Count steps that were read; a sequence that had ended counts none of them."""
        rows = self.rows[steps.start - self.first : steps.stop - self.first]
        numbers = torch.tensor(steps)[:, None]
        lengths = self.lengths + numbers + 1  # [steps, b], after each
        ran, warm = torch.tensor([(len(own.counts), own.warmup) for own in counters]).T  # [b] each
        timed = (numbers >= warm) & (numbers < ran)
        for group, part in zip(self.groups, torch.split(rows, self.sizes, 1), strict=True):
            for own, of_sequence in zip(counters, group.amounts(part, lengths, timed).tolist(), strict=True):
                for step, of_step in zip(steps, of_sequence, strict=True):
                    if step < len(own.counts):
                        for layer, amounts in zip(group.layers, of_step, strict=True):
                            own.add_all(layer, amounts, step)

    def pass_on(self, counters: Sequence[Counters]) -> None:
        """Give the counters the sums by head of all steps that were counted."""
        for group in self.groups:
            for count, sums in group.by_head.items():
                for layer, of_layer in zip(group.layers, sums.tolist(), strict=True):
                    for own, of_heads in zip(counters, of_layer, strict=True):
                        own.sum_heads(layer, count, of_heads)
            group.by_head.clear()


def _by_head(of: LoggedLayer, found: LayerStepStats, lengths: Tensor) -> dict[Count, Tensor]:
    """Return each KV head's counts in layers: found [.., b, Hk] each, lengths [.., b] -> [.., b, Hk] each."""
    corrected = found.turn == Turn.CORRECTED
    active = (lengths >= torch.tensor(of.active_from))[..., None]
    chose = found.turn != Turn.IDLE if of.speculates else active
    asked = selected_count(lengths, of.layout)[..., None] * chose
    return {
        Count.HEADS_CHECKED: corrected | (found.turn == Turn.REUSED),
        Count.HEADS_CORRECTED: corrected,
        Count.PAGES_REQUESTED: found.asked if of.varies else asked.expand_as(corrected),
        Count.MISSES: found.missed_now + found.missed_later,
    }


def _amounts(of: LoggedLayer, heads: dict[Count, Tensor], found: LayerStepStats, lengths: Tensor) -> Tensor:
    """Sum up the counts of layers: heads and found [.., b, Hk] each, lengths [.., b] -> [.., b, Count]."""
    sums = {count: of_heads.sum(-1) for count, of_heads in heads.items()}
    indexed = of.layout.size * of.layout.group  # tokens that are written out together
    together = of.num_kv_heads * of.layout.group * of.block_bytes
    written = (lengths % indexed == 0) * torch.tensor(of.writes) * together
    amounts = {
        **sums,
        Count.FIRST_RETRIEVALS: (found.turn == Turn.FIRST).sum(-1),
        Count.BYTES_TO_DEVICE: sums[Count.MISSES] * of.block_bytes,
        Count.BYTES_TO_HOST: written.expand(found.turn.shape[:-1]),
        Count.BYTES_EXPOSED: found.missed_now.sum(-1) * of.block_bytes,
    }
    none = torch.zeros_like(sums[Count.MISSES])  # graphs do not read from a disk
    return torch.stack([amounts.get(count, none) for count in Count], -1)


# Lengths of the sequences of a batch at a step, on the device, shared by all layers.


class StepLengths:
    """`seen`: tokens of every sequence, including the newest; `first`: tokens whose KV exists before the first step."""

    def __init__(self, lengths: Sequence[int], num_layers: int, device: torch.device):
        self.first = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.seen = torch.zeros_like(self.first)
        self.running = torch.zeros_like(self.first)
        shape = 4, num_layers, len(lengths)
        self.held, self.dropped, self.most, self.period = torch.ones(shape, dtype=torch.int32, device=device)
        self.some_dropped = False
        self.flags: dict[tuple[tuple[int, ...], int], tuple[Tensor, Tensor]] = {}

    def held_in(self, layer: int, parts: Sequence[LayerSlots]) -> Tensor | None:
        """Return the tokens held in a layer, if it does not hold all tokens seen; kernels take them as lengths."""
        if all(part.dropped == 0 and part.most is None and part.period is None for part in parts):
            return None
        self.some_dropped = True
        self.dropped[layer] = self.first.new_tensor([part.dropped for part in parts])
        most = torch.iinfo(torch.int32).max
        self.most[layer] = self.first.new_tensor([most if part.most is None else part.most for part in parts])
        self.period[layer] = self.first.new_tensor([most if part.period is None else part.period for part in parts])
        held: Tensor = self.held[layer]
        return held

    def active(self, slots: BatchSlots) -> Tensor:
        """Return the flags [b, Hk] of sequences in which such a layer chooses; layers that are alike share them."""
        key = tuple(slots.active_from), slots.rows.k.shape[1]
        if key not in self.flags:
            least = self.first.new_tensor(slots.active_from)[:, None].expand(-1, key[1])
            self.flags[key] = least, torch.zeros(least.shape, dtype=torch.bool, device=least.device)
        return self.flags[key][1]

    def start(self) -> None:
        """Let the sequences take part."""
        self.seen.copy_(self.first)
        self.running.fill_(1)

    def end(self, row: int) -> None:
        """Remove a sequence from further steps."""
        self.seen[row] = 0
        self.running[row] = 0

    def advance(self) -> None:
        """Begin a step."""
        self.seen.add_(self.running)
        if self.some_dropped:
            torch.sub(self.seen, self.dropped, out=self.held)
            self.held.sub_(1).fmod_(self.period).add_(1)  # one that takes no part stays at zero
            torch.minimum(self.held.clamp_min_(0), self.most, out=self.held)
        for least, flags in self.flags.values():
            torch.ge(self.seen[:, None].expand_as(flags), least, out=flags)


class PlannedLayer:
    """One layer's part of a step, as its plan says; a call appends the newest token of every sequence and attends.

    `active` [b, Hk] bool says in which sequences it chooses at this step. A layer that fetches writes its results to
    `found`. Its work outside the main stream runs in `stream`.
    """

    def __init__(
        self,
        layer: int,
        slots: BatchSlots,
        plan: StepPlan,
        active: Tensor,
        found: LayerStepStats | None,
        streams: Streams,
        stream: str,
    ):
        self.slots, self.rows, self.plan, self.active = slots, slots.rows, plan, active
        self.streams, self.stream = streams, stream
        self.prepare = plan.prepare(slots) if plan.prepare is not None else None
        self.turn = plan.turn.over_slots(slots) if plan.turn is not None else None
        self.index: StepIndex | None = plan.index.over_slots(slots) if plan.index is not None else None
        self.choose: Choice = (plan.choose or Best()).over_slots(slots)
        self.eviction = plan.evict.over_slots(slots) if plan.evict is not None else None
        self.recalls: Recalls | None = None
        if isinstance(plan.fetch, FromHost):
            assert found is not None
            self.recalls = Recalls(slots, plan.fetch, found)
        self.ahead: Ahead | None = None  # between `choose_ahead` and the call that it is for
        self.speculation: Speculation | None = None
        if plan.correction is not None:
            assert found is not None
            self.speculation = Speculation(layer, plan.correction, found)

    def __call__(self, q: Tensor, new: NewToken, softmax: Softmax) -> Tensor:
        """Append, choose and attend in the order of the plan."""
        out = torch.empty_like(q)
        if self.prepare is not None:
            self.prepare()
        if self.speculation is not None:
            self._speculate(self.speculation, q, new, softmax, out)
            return out
        if self.turn is not None:
            q, new = self.turn(q), new._replace(k=self.turn(new.k))
        if self.plan.rounds is not None:
            new = new._replace(k=self.plan.rounds(new.k), v=self.plan.rounds(new.v))
        if self.eviction is not None:
            at = self.eviction.make_room()
            paged_decode_attention(q, self.eviction.rows, softmax, out, new._replace(at=at))
            self.eviction.look_back(q, softmax)
            return out
        if self.index is None:
            paged_decode_attention(q, self.rows, softmax, out, new)
            return out
        if self.ahead is not None:
            self.streams.wait(self.ahead.done)
        if self.index.needs_newest:
            append_token(self.slots.by_position, new)
            self._take_in(new)
        if self.ahead is None:
            rows, kept, missing = self._chosen(q, softmax)
        else:
            rows, kept, missing, self.ahead = self.rows, None, None, None
        own = None if self.index.needs_newest else new
        paged_decode_attention(q, rows, softmax, out, own, kept=kept, missing=missing)
        if not self.index.needs_newest:
            self.streams.submit(self.stream, partial(self._take_in, new), [self.streams.mark()])
        return out

    def choose_ahead(self, q: Tensor, softmax: Softmax) -> None:
        """Choose and fetch for the next call, with queries q, predicted or another layer's; nothing waits yet."""
        recalls = self.recalls
        assert recalls is not None
        begun, misses = self.streams.mark(), recalls.later if self.plan.when == "borrowed" else recalls.now
        work = partial(self.bring, q, self.active, misses, softmax)
        self.ahead = Ahead(q, self.streams.submit(self.stream, work, [begun]))

    @property
    def waits_for_device(self) -> bool:
        """Whether the host needs to know something of a step, so that it cannot be captured."""
        return self.recalls is not None and self.recalls.back_end.waits_for_device

    def _chosen(self, q: Tensor, softmax: Softmax) -> tuple[PagedKV, Tensor | None, Missing | None]:
        """Choose before attention: return the rows to attend to, which of them are kept, and which are missing."""
        if self.recalls is None:
            chosen = self.select(q, self.active, softmax)
            return self.rows._replace(resident=chosen.pages), chosen.kept, None
        return self.rows, *self.lacking(q, self.active, softmax)

    def _take_in(self, new: NewToken) -> None:
        """Index and write out the newest token, or the page or block that it has completed."""
        assert self.index is not None
        self.index.update(new, self.recalls.host if self.recalls is not None and self.recalls.writes else None)

    def _speculate(self, heads: Speculation, q: Tensor, new: NewToken, softmax: Softmax, out: Tensor) -> None:
        """Attend to the choice of the step before, except for heads that turned; then choose for the next step.

        On the main stream the queries are compared, and the heads that reuse attend. In parallel, in `correction`, the
        heads that turned too far select, recall and attend, the last two in one kernel if possible; the layer waits for
        them. In a recall stream the heads that reused select and recall for the next step, once attention has read
        their slots; the step waits for that at its end. A stream with nothing to do costs the launches of kernels that
        return at once: the host is not asked.
        """
        recalls = self.recalls
        assert recalls is not None
        heads.decide(q, self.rows)
        decided = self.streams.mark()

        def correct() -> None:
            _, missing = self.lacking(heads.query, heads.waiting, softmax)
            paged_decode_attention(q, self.rows, softmax, out, new, heads.waiting, missing=missing)

        corrected: Point = self.streams.submit("correction", correct, [decided])
        paged_decode_attention(q, self.rows, softmax, out, new, heads.others)
        attended = self.streams.mark()

        def ahead() -> None:
            self._take_in(new)
            self.bring(heads.query, heads.reusing, recalls.later, softmax)

        self.streams.submit(self.stream, ahead, [attended, corrected])
        self.streams.wait(corrected)

    def bring(self, q: Tensor, heads: Tensor, misses: MissList, softmax: Softmax) -> None:
        """Select for `heads` [b, Hk], update the page table, and recall the missing pages."""
        recalls, _ = self._resolve(q, heads, misses, softmax)
        recalls.bring(misses)

    def lacking(self, q: Tensor, heads: Tensor, softmax: Softmax) -> tuple[Tensor | None, Missing | None]:
        """Do the same before attention; return the rows kept, and the pages that attention is to recall itself."""
        assert self.recalls is not None
        misses = self.recalls.now
        recalls, kept = self._resolve(q, heads, misses, softmax)
        if recalls.by_attention:
            return kept, Missing(recalls.host, misses)
        recalls.bring(misses)
        return kept, None

    def _resolve(self, q: Tensor, heads: Tensor, misses: MissList, softmax: Softmax) -> tuple[Recalls, Tensor | None]:
        """Select for `heads`, update the page table, and list the missing pages; return which rows are kept."""
        assert self.recalls is not None
        chosen = self.select(q, heads, softmax, misses)
        if chosen.asked is not None:
            torch.mul(chosen.asked[:, None], heads, out=self.recalls.asked)
        return self.recalls, chosen.kept

    def select(self, q: Tensor, heads: Tensor, softmax: Softmax, misses: MissList | None = None) -> Chosen:
        """Choose for `heads` [b, Hk] with queries q; with `misses`, update the page table and list what it lacked."""
        assert self.index is not None
        resident = None if self.recalls is None or misses is None else self.recalls.resident
        selection = Selection.empty(heads, self.slots.into.selected, resident, misses)
        return self.choose(self.index, q, softmax, heads, selection)


class SplitLayer(PlannedLayer):
    """A layer whose KV heads hold different tokens: it attends to sets of them, each in slots of its own.

    `sets` are the heads [n] int64 of each set and its slots. Queries, keys and values are put in the order of the sets.
    """

    def __init__(self, layer: int, sets: Sequence[tuple[Tensor, BatchSlots]], *beside: Any):
        super().__init__(layer, sets[0][1], StepPlan(), *beside)
        self.sets = [slots.rows for _, slots in sets]
        self.order = torch.cat([heads for heads, _ in sets]).to(self.rows.k.device)  # [Hk]
        self.back = self.order.argsort()

    @override
    def __call__(self, q: Tensor, new: NewToken, softmax: Softmax) -> Tensor:
        """Append and attend, set by set."""
        grouped = q.view(len(q), len(self.order), -1, q.shape[-1]).index_select(1, self.order)  # [b, Hk, G, d]
        new = NewToken(new.k.index_select(1, self.order), new.v.index_select(1, self.order))
        sinks = None if softmax.sinks is None else softmax.sinks.view(grouped.shape[1:3]).index_select(0, self.order)
        out, begin = torch.empty_like(grouped), 0
        for rows in self.sets:
            own = slice(begin, begin := begin + rows.k.shape[1])
            part = softmax if sinks is None else softmax._replace(sinks=sinks[own].flatten())
            token = NewToken(new.k[:, own], new.v[:, own])
            paged_decode_attention(grouped[:, own].flatten(1, 2), rows, part, out[:, own].flatten(1, 2), token)
        return out.index_select(1, self.back).flatten(1, 2)


class Ahead(NamedTuple):
    """A choice made ahead: its queries, which must live until then, and the point at which everything is there."""

    q: Tensor
    done: Point


class Recalls:
    """The back end that a layer fetches pages with, and lists of missing pages, before and after attention."""

    def __init__(self, slots: BatchSlots, fetch: FromHost, found: LayerStepStats):
        assert slots.host is not None
        self.slots, self.host, self.writes = slots.slots, slots.host, fetch.writes
        self.resident, self.asked = slots.tensors["resident"], found.asked
        self.back_end = recall_of(fetch)
        self.rebuild = fetch.rebuild(slots) if fetch.rebuild is not None else None
        plain = isinstance(self.back_end, Gather) and self.rebuild is None and self.slots is slots.rows
        self.by_attention = plain and can_bring(self.host, self.slots)  # if attention waits for the pages
        pages, into = self.resident.new_empty(2, 2, *self.resident.shape)
        self.now = MissList(pages[0], into[0], found.missed_now)
        self.later = MissList(pages[1], into[1], found.missed_later)

    def bring(self, misses: MissList) -> None:
        """Fetch the missing pages."""
        self.back_end(self.host, misses, self.slots)
        if self.rebuild is not None:
            self.rebuild(misses)


class Speculation:
    """Records which KV heads reuse the selection of the step before: state of a layer, [b, Hk] each."""

    def __init__(self, layer: int, correction: Correction, found: LayerStepStats):
        self.threshold, self.pooling = correction.below[layer], correction.pooling
        flags = torch.zeros(3, *found.turn.shape, dtype=torch.bool, device=found.turn.device)
        self.waiting, self.others, self.reusing = flags  # flags that the streams read
        self.decision = Decision(self.waiting, self.others, self.reusing, found.turn, torch.zeros_like(found.turn))
        self.query = torch.empty(0)  # [b, H, d] of the last step that retrieved

    def decide(self, q: Tensor, rows: PagedKV) -> None:
        """Decide which heads wait, and copy the queries: the caller reuses `q` before all streams have read it."""
        if self.query.numel() == 0:
            self.query = torch.zeros_like(q, memory_format=torch.contiguous_format)
        correct_heads(q, self.query, rows.lengths, rows.layout, self.threshold, self.pooling, self.decision)
