"""Prefill, layer-major in chunks; exact unless sparse attention is asked for (`SparseReading`).

Each decoder layer runs over the whole prompt in chunks before the next one begins. So only the hidden states, one
layer's KV and the method's own store are ever as long as the prompt; MLP and projection intermediates are as long as a
chunk. A layer's KV is passed to the method when its last chunk is done.

Prompts that begin alike, such as questions on one document, go through a layer together: first the common part, then
each one's rest, which attends to the common KV and its own. The first tokens' KV may be known already.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from kvcli.kernels.block_attention import add_sinks, block_attention
from kvcli.kernels.decode_attention import decode_attention
from kvcli.kernels.prefill_attention import ROWS, AShape, Pattern, prefill_attention, sparse_attention, vertical_slash
from kvcli.kernels.selected_attention import selected_attention
from kvcli.kernels.softmax import Softmax
from kvcli.kv.cache import LayerCache, both
from kvcli.kv.entries import attend_to_entries, with_new_entries
from kvcli.kv.selected import with_new_keys
from kvcli.memory.host_pool import HostPagePool
from kvcli.memory.pinned import host_memory
from kvcli.methods.config import PrefillPattern
from kvcli.models.geometry import LayerGeometry
from kvcli.runtime.attention_hook import Hook
from kvcli.runtime.layer_major import StreamedHiddenStates, chunk_length, embedded_part, layer_major, streamed
from kvcli.runtime.recurrent import PrefillStates, state_takers

# KV of a prompt's first tokens that is there already, so that they need not be computed.


class KnownKV(Protocol):
    """KV of a prompt's first tokens that need not be computed: a saved document's, or a conversation's so far."""

    @property
    def length(self) -> int:
        """Number of tokens."""

    def fill(self, layer: int, kv: Tensor) -> None:
        """Put keys and values of the first n <= `length` tokens into kv [2, Hk, n, d]; once per layer, in order."""

    def fill_state(self, layer: int, tokens: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy the state after `tokens`, a result of `cut`, of a layer that keeps one into its tensors."""

    def cut(self, limit: int) -> int:
        """Return the most tokens, up to `limit`, after which another prompt can continue: whole pages, kept states."""


@runtime_checkable
class LentKV(KnownKV, Protocol):
    """KV in pages of host memory, which caches with the same pages can share."""

    def pool(self) -> HostPagePool:
        """Return the pages of the layer that was filled last."""

    def keep(self, pool: HostPagePool) -> None:
        """Leave them to those who share them."""


class Lending:
    """Known KV whose pages `caches`, [consumer][layer], share if they can, instead of copying them."""

    def __init__(self, known: LentKV, caches: Sequence[Sequence[LayerCache]], tokens: int):
        self.known, self.caches, self.length = known, caches, tokens
        self.fill_state, self.cut = known.fill_state, known.cut

    def fill(self, layer: int, kv: Tensor) -> None:
        """Fill, and lend."""
        self.known.fill(layer, kv)
        pool = self.known.pool()
        taken = [caches[layer].share_pages(pool, self.length) for caches in self.caches]
        if any(taken):
            self.known.keep(pool)


# Prefill attention that leaves tokens out, and its audit (arXiv 2407.02490).


class SparseReading:
    """Attends by a pattern while a prompt is read, and audits the result."""

    def __init__(self, reading: PrefillPattern):
        self.reading = reading
        self.audited: defaultdict[int, list[Tensor]] = defaultdict(list)  # layer -> [queries, mass, error^2, norm^2]

    @classmethod
    def of(cls, reading: PrefillPattern) -> SparseReading | None:
        """Return None if a prompt is read exactly."""
        return None if reading.pattern == "exact" else cls(reading)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """Attend with the next chunk, q [H, m, d], to a part of all keys up to it, k and v [Hk, n, d] -> [H, m, d]."""
        out, lse = sparse_attention(q, k, v, softmax, self._pattern(q, k, softmax))
        self.audited[layer].append(_audit(q, k, v, softmax, out, lse))
        return out if softmax.sinks is None else add_sinks(out, lse, softmax.sinks[:, None])

    def statistics(self) -> Mapping[str, Any]:
        """Report the pattern, the part of the attention that it covered, and the relative RMS error of the output.

        Figures are over the audited queries of all heads: over all layers, and for each layer that did not attend to a
        window.
        """
        found = torch.stack([torch.stack(self.audited[layer]).sum(0) for layer in sorted(self.audited)])  # [layers, 4]
        queries, mass, off, norm = (found[:, at].tolist() for at in range(4))
        return {
            "prefill": str(self.reading),
            "prefill_mass": sum(mass) / sum(queries),
            "prefill_error": (sum(off) / sum(norm)) ** 0.5,
            "prefill_mass_by_layer": [m / n for m, n in zip(mass, queries, strict=True)],
            "prefill_error_by_layer": [(o / n) ** 0.5 for o, n in zip(off, norm, strict=True)],
        }

    def _pattern(self, q: Tensor, k: Tensor, softmax: Softmax) -> Pattern:
        first, second = self.reading.sizes
        if self.reading.pattern == "a-shape":
            return AShape(first, second, k.device)
        return vertical_slash(q, k, softmax, first, second)


def _audit(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, out: Tensor, lse: Tensor) -> Tensor:
    """Audit some queries by exact attention -> [4]: their number, sums of covered mass, squared error, squared norm.

    The mass that a query's pattern covers is the ratio of the softmax norms, e^(lse - lse of all keys).
    """
    (num_heads, m, _), n = q.shape, k.shape[1]
    rows = torch.linspace(0, m - 1, min(m, ROWS), device=q.device).round().long()
    causal = torch.arange(n, device=q.device) <= (n - m + rows)[:, None]  # [r, n]
    queries = q[:, rows].reshape(len(k), -1, q.shape[2])  # [Hk, G * r, d]
    exact, norm = block_attention(queries, k, v, softmax, causal.repeat(num_heads // len(k), 1))
    exact = exact.reshape(num_heads, len(rows), -1).float()
    covered = torch.exp(lse[:, rows] - norm.reshape(num_heads, -1))
    off = (out[:, rows].float() - exact).square().sum()
    found = (torch.tensor(float(covered.numel()), device=q.device), covered.sum(), off, exact.square().sum())
    return torch.stack([each.double() for each in found])


# A layer's prompt KV on its way from the computation to the method's cache.

ALONE_BYTES = 1 << 30
"""Most bytes of a layer's KV that get a second buffer; of larger ones, little is left to offload at the layer's end."""


def prefill_buffers(device: torch.device, nbytes: int) -> int:
    """Count the buffers of `nbytes` that hold a layer's KV during the prefill.

    One is being computed; on CUDA another may be offloaded meanwhile.
    """
    return 2 if device.type == "cuda" and nbytes <= ALONE_BYTES else 1


class PrefillOffloader:
    """Lends a buffer for each layer's KV, and offloads it while the next layer is computed.

    On CUDA offloading has a stream of its own, and the layers take turns with two buffers, or one that is large: a
    buffer is lent again once the work on it is done. On the CPU there is nothing to overlap with: the work is done at
    once, in one buffer.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # The work stays with its buffer, so that whatever else it reads outlives it too.
        self._lent: deque[tuple[Tensor, Callable[[], None], torch.cuda.Event | None]] = deque()
        self._without: tuple[Callable[[], None], torch.cuda.Event | None] | None = None  # the last without a buffer

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Lend an uninitialised buffer on the device."""
        found = None
        while len(self._lent) >= prefill_buffers(self.device, math.prod(shape) * dtype.itemsize):
            buffer, _, done = self._lent.popleft()
            if done is not None:
                torch.cuda.current_stream(self.device).wait_event(done)
            found = buffer if buffer.shape == shape and buffer.dtype == dtype else found
            del buffer  # before another one is allocated
        if found is not None:
            return found
        if self.device.type == "cpu":
            return host_memory(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=self.device)

    def beside(self, work: Callable[[], None]) -> None:
        """Do `work` after everything computed so far; it reads a buffer that is passed to `start` later."""
        if self.stream is None:
            work()
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            work()

    def start(self, buffer: Tensor | None, work: Callable[[], None]) -> None:
        """Do `work`, the last that reads `buffer` (None if not lent here), after everything computed so far."""
        self.beside(work)
        done = None if self.stream is None else self.stream.record_event()
        if buffer is not None:
            self._lent.append((buffer, work, done))
            return
        if self._without is not None and (before := self._without[1]) is not None:
            torch.cuda.current_stream(self.device).wait_event(before)
        self._without = work, done

    def finish(self) -> None:
        """Wait until all work is done, and release the buffers."""
        if self.stream is not None:
            self.stream.synchronize()
        self._lent.clear()
        self._without = None


class PrefillOffloaders:
    """An offloader for each device on which layers lie."""

    def __init__(self) -> None:
        self._of: dict[torch.device, PrefillOffloader] = {}

    def on(self, device: torch.device) -> PrefillOffloader:
        """Return the offloader of a device."""
        if device not in self._of:
            self._of[device] = PrefillOffloader(device)
        return self._of[device]

    def finish(self) -> None:
        """Wait until all work is done, and release the buffers."""
        for offloader in self._of.values():
            offloader.finish()


class PrefillConsumer(Protocol):
    """The recipient of a prompt's KV: a method, several at once, or an observer of it."""

    @property
    def query_rows(self) -> int:
        """Number of the prompt's last queries that it wants."""

    def observe(self, layer: int, q: Tensor, k: Tensor, softmax: Softmax) -> None:
        """See the next queries q [H, n, d] of a layer and all keys up to them, k [Hk, m, d]; do not keep them."""

    def prefill(self, layer: int, k: Tensor, v: Tensor, q: Tensor, softmax: Softmax) -> None:
        """Take over a layer's k, v [Hk, s, d] and last queries q [H, query_rows or s, d]; do not keep the tensors."""


@runtime_checkable
class PartTaker(Protocol):
    """A consumer that uses a layer's KV before it is complete, because parts of it can leave the device."""

    def lend(self, layer: int, length: int) -> Tensor | None:
        """Lend rows [t, Hk, length, d] in which a layer's KV is collected, if `prefill` would copy it there."""

    def take_part(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Take what can leave of the first m tokens' k, v [Hk, m, d]; m grows with each call before `prefill`."""

    def close(self, layer: int) -> None:
        """Learn that all consumers have received a layer's KV."""


class PrefillFanout:
    """Passes a layer's prompt KV to several methods, so that the prompt is read once."""

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
        """Return the rows of the first consumer that lends some."""
        takers = (consumer for consumer in self.consumers if isinstance(consumer, PartTaker))
        return next((rows for taker in takers if (rows := taker.lend(layer, length)) is not None), None)

    def take_part(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Pass k, v [Hk, m, d] of a layer's first tokens to the consumers that take parts."""
        for consumer in self.consumers:
            if isinstance(consumer, PartTaker):
                consumer.take_part(layer, k, v)

    def close(self, layer: int) -> None:
        """Tell all part takers that every consumer has received a layer's KV."""
        for consumer in self.consumers:
            if isinstance(consumer, PartTaker):
                consumer.close(layer)

    def prefill(self, layer: int, k: Tensor, v: Tensor, q: Tensor, softmax: Softmax) -> None:
        """Give every consumer a layer's k, v [Hk, s, d], and as many of the last queries q [H, r, d] as it wants."""
        for consumer in self.consumers:
            rows = min(consumer.query_rows, q.shape[1])
            consumer.prefill(layer, k, v, q[:, q.shape[1] - rows :], softmax)


@dataclass(frozen=True)
class Branches:
    """Prompts that begin alike: the tokens that all have in `common`, and at least one further token of each.

    The KV of the first `skip` common tokens is known, so they are not computed.
    """

    common: Sequence[int]
    rests: Sequence[Sequence[int]]
    known: KnownKV | None = None
    skip: int = 0

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], common: int) -> Branches:
        """Split prompts after their first `common` tokens, fewer than any of them has."""
        return cls(prompts[0][:common], [prompt[common:] for prompt in prompts])

    @property
    def positions(self) -> list[int]:
        """The position of every computed token: common ones, then each prompt's own."""
        start = len(self.common)
        own = [position for rest in self.rests for position in range(start, start + len(rest))]
        return [*range(self.skip, start), *own]

    @property
    def tokens(self) -> list[int]:
        """Every computed token, in the same order."""
        return [*self.common[self.skip :], *chain.from_iterable(self.rests)]

    def place(self, branch: int, tokens: int) -> int:
        """Return where a prompt's first `tokens` end among the computed ones; 0 or less if none of them is computed."""
        before = sum(map(len, self.rests[:branch])) if tokens > len(self.common) else 0
        return tokens - self.skip + before

    def ends(self) -> list[int]:
        """List where each part ends among the computed tokens: the common part, if any, and those of the prompts."""
        parts = [len(self.common) - self.skip, *map(len, self.rests)]
        return list(accumulate(parts))[parts[0] == 0 :]


@dataclass
class _LayerReading:
    """A layer whose prompts are being read: the KV so far of the prompt number `branch`, kv [t, Hk, longest, d].

    `lent` tells whether its rows are those of the cache that keeps them. q and common_q [H, rows, d] are the last
    queries so far, and those at the end of the common part.
    """

    kv: Tensor
    lent: bool
    offloader: PrefillOffloader
    q: Tensor
    common_q: Tensor
    done: int
    branch: int = 0


class PrefillAttention:
    """The handler during prefill: collects a layer's KV chunk by chunk, attends, passes the whole on.

    `consumers` has one for each prompt of the branches. The common part is read once, and shown to all of them. Several
    attentions of one decoder layer take turns, chunk by chunk.
    """

    room = None

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
        self.start = len(branches.common)  # where the prompts diverge
        self.lengths = [self.start + len(rest) for rest in branches.rests]
        self.offloaders = PrefillOffloaders()
        self.reading: dict[int, _LayerReading] = {}  # layers that have begun
        self.shared: dict[int, list[list[Tensor]]] = {}  # KV of each prompt that later layers read, in pieces

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """Attend with the next chunk: q [1, H, n, d], k and v [1, Hk, n, d] -> [1, n, H, d]."""
        now = self.reading.get(layer) or self._begin(layer, k)
        stop = now.done + k.shape[2]
        now.kv[0, :, now.done : stop] = k[0]
        now.kv[-1, :, now.done : stop] = v[0]
        seen_k, seen_v = both(now.kv[:, :, :stop])
        geometry = self.layers[layer]
        if geometry.near:
            out = attend_to_entries(q[0], seen_k, softmax.of(0), geometry)
        elif softmax.selected is not None:
            keys, values = (x[..., geometry.index_channels :] for x in (seen_k, seen_v))
            out = selected_attention(q[0], keys, values, softmax.of(0))
        elif self.sparse is not None and geometry.window is None:
            out = self.sparse(layer, q[0], seen_k, seen_v, softmax)
        else:
            out = prefill_attention(q[0], seen_k, seen_v, softmax, geometry.window, geometry.chunked)
        for consumer in self.consumers if stop <= self.start else self.consumers[now.branch :][:1]:
            consumer.observe(layer, q[0], seen_k, softmax)
        now.q = torch.cat((now.q, q[0, :, -self.rows :]), 1)[:, -self.rows :] if self.rows else now.q
        now.done = stop
        if stop == self.lengths[now.branch]:
            self._hand_over(layer, now, softmax)
        else:
            self._hand_over_part(layer, now, seen_k, seen_v)
            now.common_q = now.q if stop == self.start else now.common_q
        return out.transpose(0, 1)[None]

    def read(self, layer: int, q: Tensor, softmax: Softmax) -> Tensor:
        """Attend to the KV of `layer` with the last token of each prompt: q [1, H, b, d] -> [1, b, H, d].

        Layers that keep nothing run for these tokens alone.
        """
        whole = (both(torch.cat(pieces, 2) if len(pieces) > 1 else pieces[0]) for pieces in self.shared[layer])
        outs = [decode_attention(q[0, :, row], k, v, softmax) for row, (k, v) in enumerate(whole)]
        return torch.stack(outs)[None]

    def index(self, layer: int, keys: Tensor) -> Sequence[Tensor]:
        """Return the index keys [n + m, c] of the tokens so far and of the next chunk's `keys` [1, m, c]."""
        now, geometry = self.reading.get(layer) or self._begin(layer, keys), self.layers[layer]
        add = with_new_entries if geometry.near else with_new_keys
        return [add(now.kv, now.done, keys[0], geometry)]

    def apart(self) -> Sequence[PrefillAttention]:
        """Return this: parts of prompts are read one after another."""
        return [self]

    def _begin(self, layer: int, like: Tensor) -> _LayerReading:
        """Make room for a layer, on the device and in the dtype of `like`, and fill in known KV."""
        # The common part is read once, into rows that all prompts copy. Later layers need what their method may change.
        alone = len(self.consumers) == 1 and not self.layers[layer].readers
        lent = self.consumers[0].lend(layer, self.lengths[0]) if alone else None
        offloader, geometry = self.offloaders.on(like.device), self.layers[layer]
        shape = geometry.parts, geometry.num_kv_heads, max(self.lengths), geometry.head_dim
        kv = offloader.buffer(shape, like.dtype) if lent is None else lent
        none = like.new_empty(geometry.num_heads, 0, geometry.head_dim - geometry.index_channels)
        now = self.reading[layer] = _LayerReading(kv, lent is not None, offloader, none, none, self.branches.skip)
        if self.branches.known is not None:
            self.branches.known.fill(layer, kv[:, :, : now.done])
        return now

    def _hand_over_part(self, layer: int, now: _LayerReading, k: Tensor, v: Tensor) -> None:
        """Offload what can leave of the tokens so far, k and v [Hk, m, d], while the next chunk is computed.

        Common tokens go only to the first prompt's consumer: sharing is settled when it has all of them.
        """
        work = partial(self.consumers[now.branch].take_part, layer, k, v)
        if now.branch + 1 < len(self.consumers):
            work()  # as in `_hand_over`
        else:
            now.offloader.beside(work)

    def _hand_over(self, layer: int, now: _LayerReading, softmax: Softmax) -> None:
        """Give the prompt that was read to its consumer, and continue with the next prompt or the next layer."""
        k, v = both(now.kv[:, :, : now.done])
        last = now.branch + 1 == len(self.consumers)
        if self.layers[layer].readers:
            self.shared.setdefault(layer, []).append(self._shared(layer, now, last))
        work = partial(_given, self.consumers[now.branch], layer, k, v, now.q, softmax)
        if last:
            taken = self.layers[layer].readers and self.layers[layer].window is None
            now.offloader.start(None if now.lent or taken else now.kv, work)
            del self.reading[layer]  # with its buffer, so that one fewer is needed
        else:
            work()  # before the next prompt's own tokens overwrite this one's
            now.branch, now.done, now.q = now.branch + 1, self.start, now.common_q

    def _shared(self, layer: int, now: _LayerReading, last: bool) -> list[Tensor]:
        """Keep what later layers need of a prompt's KV for its last token; the `last` prompt's stays where it is."""
        geometry = self.layers[layer]
        if geometry.window is not None:
            seen = (now.done - 1) % geometry.window + 1 if geometry.chunked else geometry.window
            return [now.kv[:, :, max(0, now.done - seen) : now.done].clone()]
        if last:
            return [now.kv[:, :, : now.done]]
        return [now.kv[:, :, : self.start], now.kv[:, :, self.start : now.done].clone()]


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
    """Read a prompt of s >= 1 tokens into `consumer`; return the logits [vocab] of the next token.

    `advance` is called with the number of tokens that a layer has just processed: s times the number of layers in all.
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
    """Read prompts that begin alike, each into its consumer -> logits [b, vocab] of their next tokens.

    Consumers see what they would see of their prompt alone, except for the queries of skipped tokens. `sparse` leaves
    out a part of the attention in layers without a window.
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
        leaving = None if geometry.reshapes else last
        stack.enter_context(layer_major(hook, [whole if each else parts for each in at_once], leaving, advance, hidden))
        # A placeholder of the same length stands for hidden states in host memory.
        given = tokens if hidden is None else torch.zeros(*tokens.shape, 1, dtype=hook.model.dtype, device=device)
        # Of the last layers come only the tokens `last`, or all of them.
        keep = slice(None) if leaving else torch.tensor(last, device=device)
        logits = hook.run(attention, given, positions, keep, states)
    return logits[0]


def _chunks(start: int, stop: int, size: int) -> list[slice]:
    return [slice(at, min(at + size, stop)) for at in range(start, stop, size)]
