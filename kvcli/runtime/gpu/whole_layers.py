"""Layers that lie in host memory and come to the device whole, one while the layer before it is attended to (offload).

The layers of a device take buffers in turns, in the order of the model and round again. As a layer begins, the buffer
that the layer before it has read is free for the one after it. A layer is brought without its newest token, which
attention puts into the buffer and which goes to host memory from there; the first one is brought for the next step as
the last begins, when its newest token is in host memory already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from kvcli.kernels.append_token import NewToken
from kvcli.kernels.host_tokens import HostTokens, bring_tokens, store_newest
from kvcli.kernels.slot_layout import PagedKV, SlotLayout
from kvcli.kernels.softmax import Softmax
from kvcli.methods.steps.batch_slots import BatchSlots
from kvcli.methods.steps.plan import Whole
from kvcli.runtime.gpu.layers import PlannedLayer
from kvcli.runtime.gpu.lengths import StepLengths
from kvcli.runtime.gpu.streams import Point, Streams
from kvcli.store.layer_slots import NEVER, LayerSlots
from kvcli.telemetry.counters import Count, Counters

STREAM = "recall 0"


class WholeLayers:
    """Those of one device: `parts` are the slots of every layer's sequences, in host memory."""

    def __init__(self, parts: Mapping[int, Sequence[LayerSlots]], lengths: StepLengths, streams: Streams):
        self.order, self.lengths, self.streams = list(parts), lengths, streams
        self.seen = seen = lengths.seen
        tokens = {layer: [part.kv.transpose(1, 2) for part in own] for layer, own in parts.items()}
        self.host = {layer: HostTokens.of(own, seen.device) for layer, own in tokens.items()}
        self.rows = max(host.longest for host in self.host.values())
        batch, parts_of_token, _, _ = next(iter(self.host.values())).shape
        width = max(heads * d for *_, heads, d in (host.shape for host in self.host.values()))
        dtype = next(iter(self.host.values())).tokens[0].dtype
        shape = Whole.buffers(len(self.order)), batch, parts_of_token, self.rows * width
        self.buffers = seen.new_empty(shape, dtype=dtype)
        self.coming: Point | None = None  # when the layer whose turn it is is there

    def buffer(self, layer: int) -> Tensor:
        """View the buffer that a layer comes into: [b, t, rows, Hk, d]."""
        turn = self.order.index(layer)
        last = turn == len(self.order) - 1
        _, _, heads, d = self.host[layer].shape
        own = self.buffers[len(self.buffers) - 1 if last else turn % 2]
        return own[..., : self.rows * heads * d].unflatten(-1, (self.rows, heads, d))  # type: ignore[no-untyped-call, no-any-return]

    def slots(self, layer: int) -> BatchSlots:
        """Give the layer as slots, of which there is one for every token."""
        kv = self.buffer(layer).transpose(2, 3)  # [b, t, Hk, rows, d]
        layout = SlotLayout.everything(self.rows)
        arrived = self.seen.new_zeros(kv.shape[0], kv.shape[2])
        rows = PagedKV(kv[:, 0], kv[:, -1], self.seen, layout, arrived=arrived)
        return BatchSlots(rows, {}, self.seen, None, layout, [NEVER] * len(self.seen))

    def start(self) -> None:
        """Have the first layer there before the first step."""
        first = self.order[0]
        bring_tokens(self.host[first], self.seen, self.buffer(first))

    def begin(self, layer: int) -> None:
        """Let the layer after this one come, and wait for this one."""
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
        """Count those of the steps that a sequence took."""
        lengths = self.lengths.first.tolist()  # before the first step
        for layer, host in self.host.items():
            _, parts, heads, d = host.shape
            token = parts * heads * d * host.tokens[0].element_size()
            for own, length in zip(counters, lengths, strict=True):
                for step in steps[: max(0, len(own.counts) - steps.start)]:
                    brought = (length + step + 1) * token
                    early = step > 0 or layer != self.order[0]
                    amounts = dict.fromkeys(Count, 0)
                    amounts[Count.BYTES_TO_DEVICE], amounts[Count.BYTES_TO_HOST] = brought, token
                    amounts[Count.BYTES_EXPOSED] = token if early else brought
                    own.add_all(layer, list(amounts.values()), step)


class BroughtLayer(PlannedLayer):
    """A layer that attends to all of its tokens in the buffer that it has come into."""

    def __init__(self, whole: WholeLayers, layer: int, slots: BatchSlots, *beside: Any):
        super().__init__(layer, slots, *beside)
        self.whole, self.layer = whole, layer

    def __call__(self, q: Tensor, new: NewToken, softmax: Softmax) -> Tensor:
        """Attend while the next layer comes."""
        self.whole.begin(self.layer)
        out = super().__call__(q, new, softmax)
        self.whole.end(self.layer, new)
        return out
