"""The attention handler of a batch over slots.

A sequence that has ended stays in its place with length 0, for which no kernel does anything, so that shapes and
addresses are the same at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels._triton import same_strides
from kvcli.kernels.append import NewToken
from kvcli.kernels.host_tokens import HostTokens, bring_tokens, store_newest
from kvcli.kernels.norm_rope import Rotation, rotate_newest
from kvcli.kernels.page_table import MissList, PagedKV, SlotLayout, page_count
from kvcli.kernels.softmax import Softmax
from kvcli.kv.cache import NEVER, LayerCache, LayerSlots
from kvcli.methods.contract import AnyMethod
from kvcli.methods.step import BatchSlots, Chosen, FromHost, StepPlan, Whole
from kvcli.runtime.device_transfer import current
from kvcli.runtime.gpu.layers import STEPS, Log, LoggedLayer, PlannedLayer, SplitLayer, StepLengths
from kvcli.runtime.gpu.recorder import Point, Streams
from kvcli.telemetry.counters import Count, Counters

# Layers in host memory that are fetched whole, each while the layer before it attends (offload).

STREAM = "recall 0"


class WholeLayers:
    """The layers of one device: `parts` are the slots of every layer's sequences, in host memory.

    `first` are the tokens of the sequences before the first step, `seen` [b] those of the present one, on the device.
    """

    def __init__(self, parts: Mapping[int, Sequence[LayerSlots]], first: Sequence[int], seen: Tensor, streams: Streams):
        self.order, self.first, self.seen, self.streams = list(parts), first, seen, streams
        tokens = {layer: [part.kv.transpose(1, 2) for part in own] for layer, own in parts.items()}
        self.host = {layer: HostTokens.of(own, seen.device) for layer, own in tokens.items()}
        self.rows = max(host.longest for host in self.host.values())
        batch, parts_of_token, _, _ = next(iter(self.host.values())).shape
        width = max(heads * d for *_, heads, d in (host.shape for host in self.host.values()))
        dtype = next(iter(self.host.values())).tokens[0].dtype
        shape = Whole.buffers(len(self.order)), batch, parts_of_token, self.rows * width
        self.buffers = seen.new_empty(shape, dtype=dtype)
        self.coming: Point | None = None  # when the layer whose turn it is has arrived

    def buffer(self, layer: int) -> Tensor:
        """Return a view of the buffer that a layer is fetched into: [b, t, rows, Hk, d]."""
        turn = self.order.index(layer)
        last = turn == len(self.order) - 1
        _, _, heads, d = self.host[layer].shape
        own = self.buffers[len(self.buffers) - 1 if last else turn % 2]
        return own[..., : self.rows * heads * d].unflatten(-1, (self.rows, heads, d))  # type: ignore[no-untyped-call, no-any-return]

    def slots(self, layer: int) -> BatchSlots:
        """Return the layer as slots, one for every token."""
        kv = self.buffer(layer).transpose(2, 3)  # [b, t, Hk, rows, d]
        layout = SlotLayout.everything(self.rows)
        arrived = self.seen.new_zeros(kv.shape[0], kv.shape[2])
        rows = PagedKV(kv[:, 0], kv[:, -1], self.seen, layout, arrived=arrived)
        return BatchSlots(rows, {}, self.seen, None, layout, [NEVER] * len(self.seen))

    def start(self) -> None:
        """Fetch the first layer before the first step."""
        first = self.order[0]
        bring_tokens(self.host[first], self.seen, self.buffer(first))

    def begin(self, layer: int) -> None:
        """Start to fetch the layer after this one, and wait for this one."""
        begun, coming = self.streams.mark(), self.coming
        if len(self.order) > 1:  # a single one stays
            turn = (self.order.index(layer) + 1) % len(self.order)
            following = self.order[turn]
            host, buffer, missing = self.host[following], self.buffer(following), int(turn > 0)
            work = partial(bring_tokens, host, self.seen, buffer, missing)
            self.coming = self.streams.submit(STREAM, work, [begun])
        if coming is not None:
            self.streams.wait(coming)

    def end(self, layer: int, new: NewToken) -> None:
        """Write the newest token of this layer to host memory."""
        store_newest(self.host[layer], new, self.seen)

    def count(self, counters: Sequence[Counters], steps: range) -> None:
        """Count the steps that each sequence took."""
        for layer, host in self.host.items():
            _, parts, heads, d = host.shape
            token = parts * heads * d * host.tokens[0].element_size()
            for own, length in zip(counters, self.first, strict=True):
                for step in steps[: max(0, len(own.counts) - steps.start)]:
                    brought = (length + step + 1) * token
                    early = step > 0 or layer != self.order[0]
                    amounts = dict.fromkeys(Count, 0)
                    amounts[Count.BYTES_TO_DEVICE], amounts[Count.BYTES_TO_HOST] = brought, token
                    amounts[Count.BYTES_EXPOSED] = token if early else brought
                    own.add_all(layer, list(amounts.values()), step)


class FetchedLayer(PlannedLayer):
    """A layer that attends to all of its tokens in the buffer that it was fetched into."""

    def __init__(self, whole: WholeLayers, layer: int, slots: BatchSlots, *beside: Any):
        super().__init__(layer, slots, *beside)
        self.whole, self.layer = whole, layer

    def __call__(self, q: Tensor, new: NewToken, softmax: Softmax) -> Tensor:
        """Attend while the next layer is fetched."""
        self.whole.begin(self.layer)
        out = super().__call__(q, new, softmax)
        self.whole.end(self.layer, new)
        return out


# Prescribed speculation: for measuring a pipeline on random weights, whose queries mean nothing.

PATTERNS = 64
"""Steps after which everything repeats."""


@dataclass(frozen=True)
class DecisionRates:
    """The share of KV heads that a step corrects, and the share of a head's pages that a step exchanges."""

    corrected: float
    turnover: float


class SyntheticDecisions:
    """Prescribes what the heads [b, Hk] of all layers do, and the pages that they miss, the same in all layers.

    The pages on the device are a contiguous range of those that sequences choose from. It moves by `turnover` of its
    length at every step, forth for half of the `PATTERNS` and back again. At the first step all of it is missing.
    Everything is worked out beforehand: a step looks it up, in few operations, since they count as part of the step.
    """

    def __init__(
        self,
        rates: DecisionRates,
        num_layers: int,
        num_kv_heads: int,
        layout: SlotLayout,
        lengths: StepLengths,
        log: Log,
    ):
        first, device = lengths.first.cpu(), lengths.first.device
        b, k, shift = len(first), layout.selected, round(rates.turnover * layout.selected)
        candidates = (page_count(first, layout) - layout.sink - layout.window)[:, None]
        if int(candidates.min()) <= k:
            raise ValueError("rates are for sequences that have outgrown their slots")
        draw = torch.rand(PATTERNS, num_layers, b, num_kv_heads, generator=torch.Generator().manual_seed(0))
        now = draw < rates.corrected
        now = torch.cat((now, now[:1]))  # the last row is the first one, before which nothing was there
        turn = torch.arange(PATTERNS + 1) % PATTERNS
        place = shift * torch.minimum(turn, PATTERNS - turn)
        before = place[turn - 1]
        entering = torch.where(place > before, before + k, place)[:, None] + torch.arange(k)  # [turns, k]
        count = torch.full_like(turn, shift)
        count[-1] = k
        pages = layout.sink + entering[:, None] % candidates  # [turns, b, k]
        lists = torch.stack((pages, (entering % k)[:, None].expand_as(pages)), 1)[:, :, :, None]
        waits = torch.stack((now, ~now), 1)  # [turns, 2, layers, b, Hk]
        missing = count[:, None, None, None, None] * waits.transpose(1, 2)

        self.running = lengths.running[:, None]
        self.lists = lists.expand(-1, -1, -1, num_kv_heads, -1).int().contiguous().to(device)
        self.waits = waits.to(device)
        self.counts = [(missing[:, layers].int().to(device), missed) for layers, missed in log.missed()]
        self.turn = torch.zeros(1, dtype=torch.int64, device=device)
        self.listed = torch.zeros_like(self.lists[:1])
        self.flags = torch.zeros_like(self.waits[0])
        self.now, self.later = self.flags
        self.others = torch.zeros_like(self.now)

    @property
    def missed(self) -> tuple[Tensor, Tensor]:
        """The pages that each head misses at this step, and the slots that they go to, [b, Hk, k] each."""
        return self.listed[0, 0], self.listed[0, 1]

    def start(self) -> None:
        """Begin with the first step."""
        self.turn.fill_(PATTERNS)

    def advance(self) -> None:
        """Begin a step; of sequences that take no part no head does anything."""
        torch.logical_and(self.waits.index_select(0, self.turn)[0], self.running, out=self.flags)
        torch.logical_not(self.now, out=self.others)
        torch.index_select(self.lists, 0, self.turn, out=self.listed)
        for counts, missed in self.counts:
            torch.mul(counts.index_select(0, self.turn)[0], self.running, out=missed)
        self.turn.add_(1).remainder_(PATTERNS)


class SyntheticDecisionLayer(PlannedLayer):
    """A layer that compares, scores, selects and resolves, but follows prescribed decisions, and brings other pages.

    Its own page table follows its own selection; the log has the prescribed misses.
    """

    def follow(self, forced: SyntheticDecisions, layer: int) -> None:
        """Take the decisions for layer `layer` from `forced`."""
        assert self.speculation is not None
        assert self.recalls is not None
        heads, recalls = self.speculation, self.recalls
        heads.waiting, heads.others, heads.reusing = forced.now[layer], forced.others[layer], forced.later[layer]
        own = recalls.now, recalls.later
        recalls.now, recalls.later = (MissList(*forced.missed, misses.counts) for misses in own)
        self.unread = [misses._replace(counts=torch.zeros_like(misses.counts)) for misses in own]

    @override
    def select(self, q: Tensor, heads: Tensor, softmax: Softmax, misses: MissList | None = None) -> Chosen:
        """Do the work, but list what is missing where nobody looks."""
        assert self.recalls is not None
        return super().select(q, heads, softmax, self.unread[misses is self.recalls.later])


class Side(NamedTuple):
    """Shared by the layers on one device: lengths of sequences, the log of results, and streams."""

    lengths: StepLengths
    log: Log
    streams: Streams


RECALL_STREAMS = 2
"""Streams that layers take in turns: one may still recall while the next selects."""


class SlotPipeline:
    """Serves a batch of prefilled method objects, one per sequence, that state their step; takes their caches over.

    `lengths` are the tokens whose KV exists. `streams` are those of each device on which layers lie, or of all. `rates`
    are for measurements on one device (`SyntheticDecisions`). With several devices, the work of each is done within
    `on` of it.

    Raises:
        ValueError: the method cannot be served over slots.
    """

    def __init__(
        self,
        methods: Sequence[AnyMethod],
        lengths: Sequence[int],
        streams: Streams | Mapping[torch.device, Streams],
        rates: DecisionRates | None = None,
        on: Callable[[torch.device], AbstractContextManager[None]] = lambda _: nullcontext(),
    ):
        plan = methods[0].step_plan
        if plan is None or not all(method.stays_in_place for method in methods):
            raise ValueError("this method cannot be served over slots")
        self.methods, self.rates, self.on = methods, rates, on
        self.devices = [methods[0].context.device(layer) for layer in range(len(methods[0].caches))]
        assert rates is None or len(set(self.devices)) == 1
        of_device = {device: StepLengths(lengths, len(self.devices), device) for device in dict.fromkeys(self.devices)}
        of_streams = {device: streams if isinstance(streams, Streams) else streams[device] for device in of_device}
        self.whole = self._whole(lengths, of_device, of_streams) if isinstance(plan.fetch, Whole) else {}
        slots = {
            layer: self._slots(layer, of_device[device])
            for layer, device in enumerate(self.devices)
            if not methods[0].caches[layer].apart
        }
        chosen = {layer for layer in methods[0].retrieval if plan.index is not None}
        logged = {layer: _logged(layer, each, plan) for layer, each in slots.items() if layer in chosen}
        self.sides = {
            device: Side(
                seen,
                Log([each for layer, each in logged.items() if self.devices[layer] == device], lengths, device),
                of_streams[device],
            )
            for device, seen in of_device.items()
        }
        self.lengths = of_device[self.devices[0]]
        self.forced: SyntheticDecisions | None = None
        self.layers = [
            self._layer(
                layer, slots[layer], _plan_of(slots[layer], plan) if layer in methods[0].retrieval else StepPlan()
            )
            if layer in slots
            else self._split(layer)
            for layer in range(len(self.devices))
        ]
        self.turned = {layer: self._rotations(layer) for layer in self.predicted}
        self.borrowing = {layer for layer, each in enumerate(self.layers) if layer and each.plan.when == "borrowed"}
        self.steps = self.read = self.counted = 0  # run; of these read from the device; of these counted

    @property
    def waits_for_device(self) -> bool:
        """Whether the host needs to know something of a step, so that it cannot be captured."""
        return any(layer.waits_for_device for layer in self.layers)

    def start(self) -> None:
        """Let the sequences take part. A step before that changes nothing: it can be tried out."""
        for device, side in self.sides.items():
            side.lengths.start()
            side.log.start()
            if self.forced is not None:
                self.forced.start()
            if device in self.whole:
                with self.on(device):
                    self.whole[device].start()

    def end(self, row: int) -> None:
        """Remove a sequence from further steps."""
        for side in self.sides.values():
            side.lengths.end(row)

    def advance(self) -> None:
        """Begin a step: the newest token of every sequence counts."""
        for device, side in self.sides.items():
            with self.on(device):
                side.lengths.advance()
        if self.forced is not None:
            self.forced.advance()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """Attend with one token per sequence: q [b, H, 1, d], k and v [b, Hk, 1, d] -> [b, 1, H, d]."""
        new = NewToken(k[:, :, 0], v[:, :, 0])
        if not same_strides(new.k, new.v):
            new = NewToken(new.k.contiguous(), new.v.contiguous())
        if layer + 1 in self.borrowing:
            self.layers[layer + 1].choose_ahead(q[:, :, 0].clone(), softmax)  # which the caller reuses
        return self.layers[layer](q[:, :, 0], new, softmax)[:, None]

    @property
    def predicted(self) -> set[int]:
        """Layers that choose by the query predicted from the layer before; never the model's first."""
        return {layer for layer, each in enumerate(self.layers) if layer and each.plan.when == "ahead"}

    def predict(self, layer: int, q: Tensor, scale: float) -> None:
        """Let a layer choose with unrotated queries [b, H, d] before the previous layer attends."""
        rotations, seen = self.turned[layer], self.sides[self.devices[layer]].lengths.seen
        turned = torch.empty(q.shape, dtype=torch.float32, device=q.device) if rotations else q.clone()
        for part, rotation in rotations:
            rotate_newest(q[part], seen[part], rotation, turned[part])
        self.layers[layer].choose_ahead(turned, Softmax(scale))

    def settle(self) -> None:
        """End a step: wait for all streams, and keep the results."""
        for device, side in reversed(self.sides.items()):  # a step ends on the device on which it began
            with self.on(device) if side.log.keeps else nullcontext():  # an empty graph cannot be captured
                side.streams.join()
                side.log.take()

    def leave(self, device: torch.device) -> None:
        """Wait for all streams of a device before a step continues elsewhere."""
        self.sides[device].streams.join()

    def forget(self) -> None:
        """Drop everything that an aborted capture has begun, without waiting for it."""
        for side in self.sides.values():
            side.streams.forget()

    def count(self) -> None:
        """Count the results of all steps so far. Waits for the device."""
        self._count(self.read)
        self._read()
        self._count(self.read)
        for side in self.sides.values():
            side.log.pass_on(self.counters)

    def finish(self) -> None:
        """Count the last steps, and pass the tallies of their layers' choices to the methods."""
        self.count()
        for index, layer in enumerate(self.layers):
            tally = {name: numbers.tolist() for name, numbers in layer.choose.tally.items()}
            for row, method in enumerate(self.methods):
                if tally:
                    method.take_tally(index, {name: numbers[row] for name, numbers in tally.items()})

    def stepped(self) -> None:
        """Record that a step was begun, and count one before it while the device is busy.

        Every so many steps their results are read, for which the host waits until this step is done, as it then does
        for the step's token.
        """
        self.steps += 1
        self._count(min(self.counted + 1, self.read))
        if self.steps % STEPS == 0:
            self._read()

    @property
    def counters(self) -> list[Counters]:
        """The counters of the sequences."""
        return [method.context.counters for method in self.methods]

    def _read(self) -> None:
        for side in self.sides.values():
            side.log.read(range(self.read, self.steps))
        self.read = self.steps

    def _count(self, stop: int) -> None:
        """Count the steps up to `stop`, which were read."""
        steps, counters = range(self.counted, stop), self.counters
        if steps:
            for side in self.sides.values():
                side.log.count(counters, steps)
            for whole in self.whole.values():
                whole.count(counters, steps)
        self.counted = stop

    def _whole(
        self,
        first: Sequence[int],
        lengths: Mapping[torch.device, StepLengths],
        streams: Mapping[torch.device, Streams],
    ) -> dict[torch.device, WholeLayers]:
        """Find the layers of each device that are fetched whole."""
        parts = {layer: self._parts(self._caches(layer)) for layer in self.methods[0].retrieval}
        for method in self.methods:  # their buffers make room for those of the batch, once nothing is refused any more
            method.leave_phases()
        found = {}
        for device, its in lengths.items():
            own = {layer: each for layer, each in parts.items() if self.devices[layer] == device}
            if own:
                found[device] = WholeLayers(own, first, its.seen, streams[device])
        return found

    def _caches(self, layer: int) -> list[LayerCache]:
        return [method.caches[layer] for method in self.methods]

    def _parts(self, caches: Sequence[LayerCache]) -> list[LayerSlots]:
        parts = [part for part in (cache.as_slots() for cache in caches) if part is not None]
        if len(parts) < len(caches):
            raise ValueError(f"not all of {len(caches)} caches have slots")
        return parts

    def _slots(self, layer: int, lengths: StepLengths) -> BatchSlots:
        whole = self.whole.get(self.devices[layer])
        if whole is not None and layer in whole.order:
            return whole.slots(layer)
        caches = self._caches(layer)
        parts = self._parts(caches)
        held, rotary = lengths.held_in(layer, parts), [method.context.rotary[layer] for method in self.methods]
        return BatchSlots.of(caches, parts, lengths.seen, held, rotary)

    def _rotations(self, layer: int) -> list[tuple[slice, Rotation]]:
        """Return the rotation of each sequence's queries of a layer, or one for all; empty if they are not rotated."""
        first, *others = rotaries = [method.context.rotary[layer] for method in self.methods]
        alike = all(rotary is first for rotary in others)
        parts = [slice(None)] if alike else [slice(row, row + 1) for row in range(len(rotaries))]
        d = self.layers[layer].rows.k.shape[3]
        return [(part, rotary.rotation(d)) for part, rotary in zip(parts, rotaries, strict=False) if rotary is not None]

    def _layer(self, layer: int, slots: BatchSlots, plan: StepPlan) -> PlannedLayer:
        seen, log, streams = self.sides[self.devices[layer]]
        stream = f"recall {layer % RECALL_STREAMS}"
        with current(self.devices[layer]) if len(self.sides) > 1 else nullcontext():
            return self._planned(layer, slots, plan, (seen.active(slots), log.found.get(layer), streams, stream))

    def _split(self, layer: int) -> SplitLayer:
        caches, (seen, _, streams) = self._caches(layer), self.sides[self.devices[layer]]
        sets = []
        for turn, (heads, _) in enumerate(caches[0].apart):
            own = [cache.apart[turn][1] for cache in caches]
            sets.append((heads, BatchSlots.of(own, self._parts(own), seen.seen)))
        return SplitLayer(layer, sets, seen.active(sets[0][1]), None, streams, "")

    def _planned(self, layer: int, slots: BatchSlots, plan: StepPlan, beside: tuple[Any, ...]) -> PlannedLayer:
        parts = (layer, slots, plan, *beside)
        if isinstance(plan.fetch, Whole):
            return FetchedLayer(self.whole[self.devices[layer]], *parts)
        if self.rates is None or plan.correction is None:
            return PlannedLayer(*parts)
        if self.forced is None:
            num_layers, num_kv_heads = len(self.methods[0].caches), slots.rows.k.shape[1]
            log = self.sides[self.devices[layer]].log
            self.forced = SyntheticDecisions(self.rates, num_layers, num_kv_heads, slots.rows.layout, self.lengths, log)
        told = SyntheticDecisionLayer(*parts)
        told.follow(self.forced, layer)
        return told


def _plan_of(slots: BatchSlots, plan: StepPlan) -> StepPlan:
    """Return a layer's plan: just attention if it holds everything in its place, and always will."""
    idle = slots.holds_all and not isinstance(plan.fetch, Whole) and plan.evict is None
    return StepPlan(rounds=plan.rounds) if idle else plan


def _logged(layer: int, slots: BatchSlots, plan: StepPlan) -> LoggedLayer:
    heads, (block_bytes, writes) = slots.rows.k.shape[1], (0, (False,) * len(slots.active_from))
    if slots.host is not None:
        block_bytes = slots.host.block_bytes
        does = isinstance(plan.fetch, FromHost) and plan.fetch.writes
        writes = tuple(does and any(map(len, pieces)) for pieces in slots.host.pieces)  # if there is room
    speculates = plan.correction is not None
    return LoggedLayer(layer, heads, slots.into, tuple(slots.active_from), block_bytes, writes, speculates, plan.varies)
