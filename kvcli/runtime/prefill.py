"""Prefill, layer-major in chunks; exact, but where sparse attention is asked for (`kvcli.runtime.sparse_prefill`).

Each decoder layer runs over the whole prompt in chunks before the next one begins, so that only the hidden states, one
layer's KV and the method's own store are ever as long as the prompt; MLP and projection intermediates are as long as a
chunk. A layer's KV is handed to the method when its last chunk is done.

Prompts that begin alike, as questions on one document do, go through a layer together: what they have in common once,
then each one's rest, which attends to the common KV and its own. The first tokens' KV may be known already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kvcli.kernels.prefill_attention import prefill_attention
from kvcli.kernels.softmax import Softmax
from kvcli.models.geometry import LayerGeometry
from kvcli.runtime.attention_hook import Hook
from kvcli.runtime.hidden_states import StreamedHiddenStates, embedded_part, streamed
from kvcli.runtime.known_kv import KnownKV
from kvcli.runtime.layer_major import chunk_length, layer_major
from kvcli.runtime.recurrent import PrefillStates, state_takers
from kvcli.runtime.sparse_prefill import SparseReading
from kvcli.store.cache import both
from kvcli.store.prefill_offloader import PrefillOffloaders


class PrefillConsumer(Protocol):
    """What a prompt's KV is handed to: a method, several at once, or something that only looks at it."""

    @property
    def query_rows(self) -> int:
        """How many of the prompt's last queries are wanted."""

    def observe(self, layer: int, q: Tensor, k: Tensor, softmax: Softmax) -> None:
        """See the next queries q [H, n, d] of a layer and all keys up to them, k [Hk, m, d]; not to be kept."""

    def prefill(self, layer: int, k: Tensor, v: Tensor, q: Tensor, softmax: Softmax) -> None:
        """Take over a layer's k, v [Hk, s, d] and last queries q [H, query_rows or s, d]; not to be kept."""


@runtime_checkable
class PartTaker(Protocol):
    """Who has use for a layer's KV before all of it is there, because parts of it can leave the device."""

    def lend(self, layer: int, length: int) -> Tensor | None:
        """Lend rows [t, Hk, length, d] in which a layer's KV is collected, where `prefill` would copy it there."""

    def take_part(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Take what can leave of the first m tokens' k, v [Hk, m, d]; ever more of them, then `prefill` is called."""

    def close(self, layer: int) -> None:
        """Know that all who a layer's KV is handed to have had it."""


class PrefillFanout:
    """Hands a layer's prompt KV to several methods, so that the prompt is read once."""

    def __init__(self, consumers: Sequence[PrefillConsumer]):
        self.consumers = consumers

    @property
    def query_rows(self) -> int:
        """The most of the prompt's last queries that a consumer wants."""
        return max(consumer.query_rows for consumer in self.consumers)

    def observe(self, layer: int, q: Tensor, k: Tensor, softmax: Softmax) -> None:
        """Show every consumer how a layer reads the prompt."""
        for consumer in self.consumers:
            consumer.observe(layer, q, k, softmax)

    def lend(self, layer: int, length: int) -> Tensor | None:
        """Give the rows of the first consumer that lends some."""
        takers = (consumer for consumer in self.consumers if isinstance(consumer, PartTaker))
        return next((rows for taker in takers if (rows := taker.lend(layer, length)) is not None), None)

    def take_part(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Give k, v [Hk, m, d] of a layer's first tokens to those consumers that have use for them."""
        for consumer in self.consumers:
            if isinstance(consumer, PartTaker):
                consumer.take_part(layer, k, v)

    def close(self, layer: int) -> None:
        """Say that everybody had a layer's KV."""
        for consumer in self.consumers:
            if isinstance(consumer, PartTaker):
                consumer.close(layer)

    def prefill(self, layer: int, k: Tensor, v: Tensor, q: Tensor, softmax: Softmax) -> None:
        """Give every consumer a layer's k, v [Hk, s, d], and those of the last queries q [H, r, d] that it wants."""
        for consumer in self.consumers:
            rows = min(consumer.query_rows, q.shape[1])
            consumer.prefill(layer, k, v, q[:, q.shape[1] - rows :], softmax)


@dataclass(frozen=True)
class Branches:
    """Prompts that begin alike: the tokens that all have in `common`, and at least one token that each goes on with.

    Of the common tokens, the first `skip` are not computed: their KV is known.
    """

    common: Sequence[int]
    rests: Sequence[Sequence[int]]
    known: KnownKV | None = None
    skip: int = 0

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], common: int) -> Branches:
        """Part prompts that have so many tokens in common, less than any of them has."""
        return cls(prompts[0][:common], [prompt[common:] for prompt in prompts])

    @property
    def positions(self) -> list[int]:
        """The position of every token that is computed: common ones, then each prompt's own."""
        start = len(self.common)
        own = [position for rest in self.rests for position in range(start, start + len(rest))]
        return [*range(self.skip, start), *own]

    @property
    def tokens(self) -> list[int]:
        """Every token that is computed, in the same order."""
        return [*self.common[self.skip :], *chain.from_iterable(self.rests)]

    def place(self, branch: int, tokens: int) -> int:
        """Where a prompt's first so many tokens end among those that are computed; not above 0 where none is."""
        before = sum(map(len, self.rests[:branch])) if tokens > len(self.common) else 0
        return tokens - self.skip + before

    def ends(self) -> list[int]:
        """Where each of the parts ends among these tokens: the common one, if it has any, and those of the prompts."""
        parts = [len(self.common) - self.skip, *map(len, self.rests)]
        return list(accumulate(parts))[parts[0] == 0 :]


class PrefillAttention:
    """The handler during prefill: collects a layer's KV chunk by chunk, attends, hands the whole over.

    `consumers` are those of each prompt of the branches. The common part is read once, and shown to all of them.
    """

    def __init__(
        self,
        branches: Branches,
        consumers: Sequence[PrefillConsumer],
        layers: Sequence[LayerGeometry],
        sparse: SparseReading | None = None,
    ):
        self.branches, self.layers, self.sparse = branches, layers, sparse
        self.consumers = [PrefillFanout([consumer]) for consumer in consumers]
        self.rows = max(consumer.query_rows for consumer in consumers)
        self.start = len(branches.common)  # where the prompts part
        self.lengths = [self.start + len(rest) for rest in branches.rests]
        self.offloaders = PrefillOffloaders()
        self.branch: int | None = None  # the prompt being read; None at a layer's beginning
        self.done = 0  # its tokens of the current layer
        self.kv = torch.empty(0)  # [t, Hk, longest, d] of the current layer
        self.lent = False  # by the cache that keeps it
        self.q = self.common_q = torch.empty(0)  # [H, rows, d], its last queries

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """Attend with the next chunk: q [1, H, n, d], k and v [1, Hk, n, d] -> [1, n, H, d]."""
        if self.branch is None:
            self._begin(layer, q, k)
        assert self.branch is not None
        stop = self.done + k.shape[2]
        self.kv[0, :, self.done : stop] = k[0]
        self.kv[-1, :, self.done : stop] = v[0]
        seen_k, seen_v = both(self.kv[:, :, :stop])
        geometry = self.layers[layer]
        if self.sparse is not None and geometry.window is None:
            out = self.sparse(layer, q[0], seen_k, seen_v, softmax)
        else:
            out = prefill_attention(q[0], seen_k, seen_v, softmax, geometry.window, geometry.chunked)
        for consumer in self.consumers if stop <= self.start else self.consumers[self.branch :][:1]:
            consumer.observe(layer, q[0], seen_k, softmax)
        self.q = torch.cat((self.q, q[0, :, -self.rows :]), 1)[:, -self.rows :] if self.rows else self.q
        self.done = stop
        if stop == self.lengths[self.branch]:
            self._hand_over(layer, softmax)
        else:
            self._hand_over_part(layer, seen_k, seen_v)
            self.common_q = self.q if stop == self.start else self.common_q
        return out.transpose(0, 1)[None]

    def _begin(self, layer: int, q: Tensor, k: Tensor) -> None:
        """Make room for a layer, q [1, H, n, d] and k [1, Hk, n, d] of its first chunk, and get what is known."""
        self.kv = torch.empty(0)  # lets go of the buffer before, so that there need not be one more
        # What prompts have in common is read once, into rows that all of them copy.
        lent = self.consumers[0].lend(layer, self.lengths[0]) if len(self.consumers) == 1 else None
        self.lent = lent is not None
        self.offloader = self.offloaders.on(k.device)
        shape = self.layers[layer].parts, k.shape[1], max(self.lengths), k.shape[3]
        self.kv = self.offloader.buffer(shape, k.dtype) if lent is None else lent
        self.q = self.common_q = q.new_empty(q.shape[1], 0, q.shape[3])
        self.branch, self.done = 0, self.branches.skip
        if self.branches.known is not None:
            self.branches.known.fill(layer, self.kv[:, :, : self.done])

    def _hand_over_part(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Let what can leave of the tokens so far, k and v [Hk, m, d], do so while the next chunk is computed.

        Of the common tokens only the first prompt's consumer: what others share with it is settled when it has all.
        """
        assert self.branch is not None
        work = partial(self.consumers[self.branch].take_part, layer, k, v)
        if self.branch + 1 < len(self.consumers):
            work()  # as in `_hand_over`
        else:
            self.offloader.beside(work)

    def _hand_over(self, layer: int, softmax: Softmax) -> None:
        """Give the prompt that was read to its consumer, and go on with the next one, or to the next layer."""
        assert self.branch is not None
        k, v = both(self.kv[:, :, : self.done])
        work = partial(_given, self.consumers[self.branch], layer, k, v, self.q, softmax)
        if self.branch + 1 < len(self.consumers):
            work()  # before the next prompt's own tokens take the place of this one's
            self.branch, self.done, self.q = self.branch + 1, self.start, self.common_q
        else:
            self.offloader.start(None if self.lent else self.kv, work)
            self.branch = None


def _given(consumer: PrefillFanout, layer: int, k: Tensor, v: Tensor, q: Tensor, softmax: Softmax) -> None:
    consumer.prefill(layer, k, v, q, softmax)
    consumer.close(layer)


def prefill(
    hook: Hook,
    ids: Sequence[int],
    consumer: PrefillConsumer,
    layers: Sequence[LayerGeometry],
    advance: Callable[[int], None],
    chunk: int | None = None,
) -> Tensor:
    """Read a prompt of s >= 1 tokens into `consumer`; returns the logits [vocab] of the token that follows.

    `advance` is called with the number of tokens that a layer has just done: s times the number of layers in all.
    """
    return prefill_branches(hook, Branches((), [ids]), [consumer], layers, advance, chunk)[0]


@torch.inference_mode()
def prefill_branches(
    hook: Hook,
    branches: Branches,
    consumers: Sequence[PrefillConsumer],
    layers: Sequence[LayerGeometry],
    advance: Callable[[int], None],
    chunk: int | None = None,
    sparse: SparseReading | None = None,
) -> Tensor:
    """Read prompts that begin alike, each into its consumer -> logits [b, vocab] of the tokens that follow them.

    Consumers see what they would see of their prompt alone, but for the queries of tokens that are skipped. Of what is
    attended to `sparse` leaves out a part, in layers that do not attend to a window anyway.
    """
    device, geometry = hook.model.device, hook.geometry
    attention = PrefillAttention(branches, consumers, layers, sparse)
    tokens = torch.tensor([branches.tokens], device=device)  # [1, n]
    positions = torch.tensor([branches.positions], device=device)  # [1, n]
    ends, size = branches.ends(), chunk or chunk_length(device)
    takers = [state_takers(consumer) for consumer in consumers]
    known = None if branches.known is None else branches.known.fill_state
    keeping = [each for each, layer in zip(hook.devices, geometry.decoder, strict=True) if layer.state]
    states = PrefillStates(geometry.states, keeping, takers, attention.start, attention.lengths, branches.skip, known)
    marked = [(branch, mark) for branch, row in enumerate(takers) for taker in row for mark in taker.state_marks]
    marks = {branches.place(*each) for each in marked if geometry.states}
    stops = sorted({0, *ends, *(mark for mark in marks if mark > 0)})
    whole = [slice(*pair) for pair in pairwise(stops)]
    parts = [part for piece in whole for part in _chunks(piece.start, piece.stop, size)]
    kept = iter(geometry.states)
    at_once = [layer.state is not None and not next(kept).resumes for layer in geometry.decoder]
    last = [end - 1 for end in ends[-len(branches.rests) :]]
    with ExitStack() as stack:
        stack.callback(attention.offloaders.finish)
        hidden = None
        if streamed(geometry, tokens.shape[1], hook.model.dtype.itemsize, device):
            embed = partial(embedded_part, hook, tokens, positions)
            hidden = StreamedHiddenStates(parts, embed, hook.devices)
            stack.callback(hidden.close)
        stack.enter_context(layer_major(hook, [whole if each else parts for each in at_once], last, advance, hidden))
        # Those in host memory are stood for by something as long as they are.
        given = tokens if hidden is None else torch.zeros(*tokens.shape, 1, dtype=hook.model.dtype, device=device)
        logits = hook.run(attention, given, positions, len(last), states)
    return logits[0]


def _chunks(start: int, stop: int, size: int) -> list[slice]:
    return [slice(at, min(at + size, stop)) for at in range(start, stop, size)]
