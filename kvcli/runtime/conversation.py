"""A conversation in tokens: earlier turns stay read, and each turn reads only what is new.

Every answer is that of its method to the conversation so far, read as one prompt. What earlier turns have read is kept
as raw KV in host memory (`RawKV`). A turn reads its own tokens and the answer before it, exactly and at once, and
passes everything to a fresh method object. A method that decides at a prompt's end what to keep decides again for each
question. Methods that read by windows have KV of their own: such an object stays and reads on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.errors import usage_error
from kvcli.inputs.profiles import Profile
from kvcli.kernels.softmax import Softmax
from kvcli.kv.cache import Tiers, both
from kvcli.kv.pages import paged
from kvcli.kv.recurrent import PAGE as PAGE
from kvcli.kv.recurrent import KeptStates
from kvcli.memory.host_pool import HostPagePool
from kvcli.memory.tiers import Footprint
from kvcli.methods import get_method
from kvcli.methods.contract import AnyMethod, SequenceContext
from kvcli.models.geometry import ModelGeometry
from kvcli.models.loading import Model
from kvcli.runtime.engine import Engine, engine
from kvcli.runtime.pipeline import Pipeline
from kvcli.runtime.prefill import Branches, prefill_branches
from kvcli.runtime.read_together import check_reads_exactly
from kvcli.runtime.sampling import Sampling
from kvcli.runtime.saved.reader import SavedKV
from kvcli.runtime.saved.writer import KVWriter
from kvcli.runtime.sequence import RunningSequence
from kvcli.runtime.streamed_weights import Streamed
from kvcli.runtime.windowed import windowed_prefill
from kvcli.telemetry.counters import Counters
from kvcli.telemetry.observer import Observer
from kvcli.telemetry.report import KVOrigin

# The KV of a conversation so far in host memory: all layers, as the model made it, in whole pages.


class RawKV:
    """Records the KV of a prompt's exact reading (a `PrefillConsumer`), and provides it to the next one (a `KnownKV`).

    There is room for `tokens`. The first `pages` pages, and the states after them, share the memory of `before`.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        tiers: Tiers,
        tokens: int,
        before: RawKV | None = None,
        pages: int = 0,
    ):
        self._filled = 0  # the layer that was filled last
        self.known = pages if before is not None else 0  # pages
        self.states: KeptStates = KeptStates(
            geometry.states, tokens, None if before is None else before.states, PAGE * self.known
        )
        self.pools = [
            HostPagePool(each.num_kv_heads, each.head_dim, PAGE, tokens // PAGE, tiers, tensors=each.parts)
            for each in geometry.layers
        ]
        for pool, other in zip(self.pools, before.pools if before is not None else (), strict=False):
            if self.known:
                pool.share(other, self.known)

    @property
    def length(self) -> int:
        """Tokens whose KV is there in all layers."""
        return PAGE * min(pool.written for pool in self.pools)

    @property
    def query_rows(self) -> int:
        """Zero: no query of the prompt is needed."""
        return 0

    def observe(self, layer: int, q: Tensor, k: Tensor, softmax: Softmax) -> None:
        """Ignore queries."""

    def prefill(self, layer: int, k: Tensor, v: Tensor, q: Tensor, softmax: Softmax) -> None:  # noqa: ARG002
        """Record the pages of k, v [Hk, s, d] that are not there yet."""
        stop = k.shape[1] // PAGE * PAGE
        start = min(self.known * PAGE, stop)
        self.pools[layer].write(start // PAGE, *(paged(each[:, start:stop], PAGE) for each in (k, v)))

    def fill(self, layer: int, kv: Tensor) -> None:
        """Put keys and values of the first n tokens, n a multiple of `PAGE`, into kv [t, Hk, n, d]."""
        self._filled = layer
        at, pages = 0, kv.shape[2] // PAGE
        for piece in self.pools[layer].pieces:
            here = piece[: max(0, pages - at)].to(kv.device)  # [n, Hk, t, p, d]
            for part, rows in enumerate(kv):
                paged(rows, PAGE)[:, at : at + len(here)].copy_(here[:, :, part].transpose(0, 1))
            at += len(here)

    def fill_state(self, layer: int, tokens: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy a layer's state after `tokens` into its tensors."""
        self.states.fill(layer, tokens, tensors)

    def cut(self, limit: int) -> int:
        """Return the most tokens, up to `limit`, after which another prompt can continue."""
        return self.states.cut(limit)

    def pool(self) -> HostPagePool:
        """Return the pages of the layer that was filled last, which caches with the same pages can share."""
        return self.pools[self._filled]

    def keep(self, pool: HostPagePool) -> None:
        """Do nothing: those who share pages hold them."""

    def footprint(self) -> Footprint:
        """Count the bytes of everything held, including what others hold as well."""
        held = sum((pool.footprint() for pool in self.pools), self.states.footprint())
        return Footprint(host=held.host + held.shared)


Finder = Callable[[Sequence[int], str, Tiers], SavedKV | None]
"""Opens the KV saved for the beginning of these tokens, with positions of this fingerprint; None if there is none."""

ROOM = 4
"""Number of further answers that a method that reads by windows gets room for."""


@dataclass(frozen=True)
class NewTurn:
    """A turn: the whole conversation in tokens up to where the answer begins, and the question's tokens alone.

    The answer is drawn for the `attempt`-th time.
    """

    ids: Sequence[int]
    question: Sequence[int] = ()
    attempt: int = 0


@dataclass
class WindowedReader:
    """A method that reads by windows, with what it has read: `ids` before its last answer, and that answer."""

    profile: Profile
    method: AnyMethod
    ids: list[int]
    sequence: RunningSequence | None = None

    @property
    def length(self) -> int:
        """Tokens in its cache."""
        return self.method.caches[0].length

    def continued_by(self, ids: Sequence[int]) -> bool:
        """Tell whether a conversation begins with everything in the cache."""
        answer = self.sequence.token_ids if self.sequence is not None else []
        held = [*self.ids, *answer][: self.length]
        return len(ids) > len(held) and list(ids[: len(held)]) == held


class Conversation:
    """The KV that one conversation has read so far; `observer` is told of stages and of what is read again."""

    def __init__(self, model: Model, observer: Observer):
        self.model, self.observer = model, observer
        self.ids: list[int] = []
        """Tokens that were read; the raw KV covers their whole pages."""
        self._kv: RawKV | None = None
        self._capacity = 1  # of the KV: positions may depend on it
        self._windowed: WindowedReader | None = None
        self._tiers = Tiers.for_device(model.device, model.dtype)
        self._streamed = [Streamed(), Streamed()]  # while something was read, and in steps

    def footprint(self) -> Footprint:
        """Count the bytes that are kept between turns."""
        return Footprint() if self._kv is None else self._kv.footprint()

    def save(self, writers: Callable[[Sequence[int], str], Sequence[KVWriter]]) -> int:
        """Save what was read, by writers made from tokens and their positions' fingerprint; return the tokens.

        Raises:
            KvcliError: no page was read yet (usage), or it could not be saved.
        """
        if self._kv is None or not self._kv.length:
            raise usage_error(f"there is no KV yet, or less than {PAGE} tokens", "ask a question first")
        tokens, kv = self._kv.length, self._kv
        with self._engine(self._capacity) as ready:
            chosen = writers(self.ids[:tokens], ready.rope.fingerprint(self._capacity))
            for layer in ready.layers:
                rows = self._tiers.scratch(layer.parts, layer.num_kv_heads, tokens, layer.head_dim)
                kv.fill(layer.index, rows)
                for writer in chosen:
                    writer.prefill(layer.index, *both(rows), rows[:0], Softmax(1.0))
            for state, at, tensors in kv.states:
                for writer in chosen:
                    writer.take_state(state, at, tensors)
        for writer in chosen:
            writer.finish()
        return tokens

    def read(self, ids: Sequence[int], capacity: int, find: Finder | None = None) -> None:
        """Read the beginning of a conversation before its first question; leave room for `capacity`.

        `find` opens the KV saved for it, which is loaded instead.
        """
        with self._engine(capacity) as ready, ExitStack() as until_read:
            kv = RawKV(self.model.geometry, self._tiers, len(ids))
            known, skip = None, 0
            if find is not None:
                known = find(ids, ready.rope.fingerprint(capacity), self._tiers)
            if known is not None:
                until_read.enter_context(known)
                skip = known.cut(min(known.length, len(ids) - 1))
            branches = Branches(ids[:skip], [ids[skip:]], known if skip else None, skip)
            self.observer.stage("prefill", (len(ids) - skip) * ready.depth)
            ready.rope.use([capacity])
            prefill_branches(ready.hook, branches, [kv], ready.layers, self.observer.advance)
            self._count(ready, 0)
            self.observer.stage_done()
            self._keep(ids, kv, capacity)

    def answer(
        self, turn: NewTurn, profile: Profile, sampling: Sampling, pipeline: Pipeline = "blocking"
    ) -> Generator[tuple[RunningSequence, str], None, None]:
        """Read what is new and answer; yield the sequence with each new text, until it has ended."""
        capacity = len(turn.ids) + sampling.max_tokens
        with self._engine(capacity, capacity + ROOM * sampling.max_tokens) as ready:
            ready.learn(profile)  # can take minutes, which do not count as reading
            started = time.perf_counter()
            reader = self._reader(ready, turn, profile, sampling)
            if reader is None:
                method = ready.method(profile, ready.context(len(turn.ids), sampling.max_tokens, turn.question))
                logits, read = self._read_exactly(ready, turn.ids, method)
            else:
                method = reader.method
                logits, read = self._read_by_windows(ready, turn.ids, reader)
            self._count(ready, 0)
            self._windowed = reader
            sequence = ready.sequence(method, sampling, sample=turn.attempt, ids=turn.ids)
            sequence.prompt_tokens = len(turn.ids)
            sequence.kv = KVOrigin(read, len(turn.ids) - read)
            if reader is not None:
                reader.sequence = sequence
            sequence.prefill_ms = 1000 * (time.perf_counter() - started)
            piece = sequence.accept(logits)
            sequence.ttft_ms = 1000 * (time.perf_counter() - started)
            yield sequence, piece
            try:
                for step in ready.decode([sequence], pipeline=pipeline):
                    yield step[0]
            finally:
                self._count(ready, 1)

    def taken(self) -> list[Streamed]:
        """Return the streamed weights that were loaded since the last look: while something was read, and in steps."""
        counted, self._streamed = self._streamed, [Streamed(), Streamed()]
        return counted

    def _count(self, ready: Engine, when: int) -> None:
        if (streamed := ready.hook.streamed) is not None:
            self._streamed[when] = self._streamed[when].plus(streamed.taken())

    def _engine(self, *capacities: int) -> AbstractContextManager[Engine]:
        held = [] if self._windowed is None else [self._windowed.method.context.capacity]
        return engine(self.model, {*capacities, self._capacity, *held}, self.observer.notice)

    def _keep(self, ids: Sequence[int], kv: RawKV, capacity: int) -> None:
        self.ids, self._kv, self._capacity = list(ids), kv, capacity

    def _read_exactly(self, ready: Engine, ids: Sequence[int], method: AnyMethod) -> tuple[torch.Tensor, int]:
        """Read what is not known yet into a method -> logits [vocab] of the next token, and number of tokens read."""
        check_reads_exactly("a chat", method.config)
        capacity, skip = method.context.capacity, 0
        if self._kv is not None and ready.rope.alike([capacity, self._capacity]):
            known = min(in_common(self.ids, ids), self._kv.length)
            wanted = len(ids) if method.observes else max(1, method.query_rows)  # queries
            limit = max(0, min(known, len(ids) - wanted))
            skip = self._kv.cut(limit)
            if limit < PAGE <= known:
                self.observer.notice("this method needs all queries of its prompt: prefilling it again")
        kv = RawKV(self.model.geometry, self._tiers, len(ids), self._kv, skip // PAGE)
        branches = Branches(ids[:skip], [ids[skip:]], self._kv if skip else None, skip)
        read = len(ids) - skip
        self.observer.stage("prefill", (read + ready.repeated_tokens(branches, [[method]])) * ready.depth)
        ((logits,),) = ready.prefill_branches(branches, [[method]], self.observer.advance, watchers=[kv])
        self.observer.stage_done()
        self._keep(ids, kv, capacity)
        return logits, read

    def _reader(self, ready: Engine, turn: NewTurn, profile: Profile, sampling: Sampling) -> WindowedReader | None:
        """Return the reader of this turn if the method reads by windows: the previous turn's if it can continue."""
        meta = SequenceContext.of(len(ready.layers), torch.device("meta"), self.model.dtype, 1)
        if get_method(profile.method)(profile.settings, ready.layers, meta).prefill_window is None:
            return None
        before, needed = self._windowed, len(turn.ids) + sampling.max_tokens
        fits = before is not None and before.profile == profile and needed <= before.method.context.capacity
        if before is not None and fits and turn.attempt == 0 and before.continued_by(turn.ids):
            before.method.context.counters = Counters(len(ready.layers))
            return before
        if self.ids or before is not None:
            self.observer.notice(f"{profile.method} prefills in its own windows: prefilling the conversation again")
        room = needed + ROOM * sampling.max_tokens
        context = ready.context(len(turn.ids), sampling.max_tokens, turn.question, capacity=room)
        return WindowedReader(profile, ready.method(profile, context), [])

    def _read_by_windows(self, ready: Engine, ids: Sequence[int], reader: WindowedReader) -> tuple[torch.Tensor, int]:
        method, start = reader.method, reader.length
        assert method.prefill_window is not None
        read = len(ids) - start
        ready.rope.use([method.context.capacity])
        self.observer.stage("prefill", read * ready.depth)
        logits = windowed_prefill(
            ready.hook, ids, method, ready.layers, self.observer.advance, method.prefill_window, start
        )
        self.observer.stage_done()
        reader.ids = list(ids)
        return logits, read


def in_common(before: Sequence[int], now: Sequence[int]) -> int:
    """Count the tokens that two conversations begin with in common."""
    same = next((at for at, pair in enumerate(zip(before, now, strict=False)) if pair[0] != pair[1]), None)
    return min(len(before), len(now)) if same is None else same
