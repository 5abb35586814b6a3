"""Read the weights of streamed layers, each while the layer before it is computed (`kvcli.models.streamed`)."""

from __future__ import annotations

import functools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcli.errors import usage_error
from kvcli.memory.disk_tier import ALIGNMENT, READ_BYTES, DamagedError, DiskError, UnbufferedFile
from kvcli.memory.pinned import host_memory, pinned_allocator
from kvcli.models.streamed import ExpertMemory, Layout, Source, layout_of
from kvcli.runtime.fused import replaced

READERS = 8
"""Threads that read, each with a buffer of its own."""

_BUFFER = READ_BYTES + 2 * ALIGNMENT


class WeightReader:
    """Reads weights past the system's cache, by several threads.

    Raises:
        DiskError: a file cannot be opened or read, or ends too early.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(READERS, "weights")
        self._files: dict[Path, UnbufferedFile] = {}
        self._own = threading.local()

    def start(self, source: Source, target: Tensor) -> list[Future[None]]:
        """Begin to fill `target` [n], bytes of host memory."""
        begun, at = [], 0
        for file, offset, nbytes in source.pieces:
            if file not in self._files:
                try:
                    self._files[file] = UnbufferedFile(file)
                except OSError as error:
                    raise _failed(file, error) from None
            for begin in range(0, nbytes, READ_BYTES):
                part = target[at + begin : at + min(begin + READ_BYTES, nbytes)]
                begun.append(self._threads.submit(self._read, file, offset + begin, part))
            at += nbytes
        return begun

    def finish(self, begun: Sequence[Future[None]], sources: Sequence[tuple[Source, Tensor]]) -> None:
        """Wait for all reads, and settle what was read."""
        wait(begun)
        for each in begun:
            each.result()
        for source, target in sources:
            if source.settle is not None:
                source.settle(target)

    def close(self) -> None:
        """End the threads, and close the files."""
        self._threads.shutdown(cancel_futures=True)
        while self._files:
            self._files.popitem()[1].close()

    def _read(self, path: Path, offset: int, target: Tensor) -> None:
        if not hasattr(self._own, "buffer"):
            self._own.buffer = host_memory((_BUFFER,), torch.uint8)
        file, nbytes = self._files[path], len(target)
        first, end = offset // ALIGNMENT * ALIGNMENT, offset + nbytes
        try:
            last = max(end, min(-(-end // ALIGNMENT) * ALIGNMENT, os.fstat(file.fd).st_size))
            file.read_into(self._own.buffer[: last - first], first)
            if file.direct is None:
                os.posix_fadvise(file.fd, first, last - first, os.POSIX_FADV_DONTNEED)
        except (OSError, DamagedError) as error:
            raise _failed(path, error) from None
        target.numpy()[:] = self._own.buffer.numpy()[offset - first :][:nbytes]


def _failed(path: Path, error: Exception) -> DiskError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    what = f"{path}: reading weights failed: {reason}"
    return DiskError(what, "leave the file alone during a run; if it is cut off, download it again")


class _Loader(Protocol):
    """Loads layers into their buffers."""

    def start(self, at: int, buffer: Tensor) -> Any:
        """Begin to load the layer `at`; whatever is computed with the buffer so far must not see it."""

    def finish(self, at: int, buffer: Tensor, begun: Any) -> None:
        """Wait for what `start` returned."""


class _FromFiles:
    """Loads layers from files; `weights` has the weights of each, with the beginnings of their bytes in its buffer."""

    def __init__(self, reader: WeightReader, weights: Sequence[Sequence[tuple[Source, int]]]):
        self.reader, self.weights = reader, weights
        self._reads: dict[int, list[Future[None]]] = {}  # the latest into each buffer, by its address

    def start(self, at: int, buffer: Tensor) -> list[Future[None]]:
        begun = self._reads.setdefault(buffer.data_ptr(), [])
        wait(begun)  # a run that was interrupted left them
        begun[:] = [each for source, target in self._targets(at, buffer) for each in self.reader.start(source, target)]
        return begun

    def finish(self, at: int, buffer: Tensor, begun: Any) -> None:
        self.reader.finish(begun, list(self._targets(at, buffer)))

    def _targets(self, at: int, buffer: Tensor) -> Iterator[tuple[Source, Tensor]]:
        return ((source, buffer[begin : begin + source.nbytes]) for source, begin in self.weights[at])


class _FromHost:
    """Loads layers from host memory, on a GPU by a stream of its own."""

    def __init__(self, layers: Sequence[Tensor], device: torch.device):
        self.layers, self.device = layers, device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def start(self, at: int, buffer: Tensor) -> torch.cuda.Event | None:
        target = buffer[: len(self.layers[at])]
        if self.stream is None:
            target.copy_(self.layers[at])
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(self.layers[at], non_blocking=True)
            copied: torch.cuda.Event = self.stream.record_event()
        return copied

    def finish(self, at: int, buffer: Tensor, begun: Any) -> None:  # noqa: ARG002
        if begun is not None:
            torch.cuda.current_stream(self.device).wait_event(begun)


class Streamed(NamedTuple):
    """Bytes of weights that were loaded, nanoseconds in which the run waited for them, and experts.

    `asked` counts the experts that routers chose, each once a layer and chunk; `cached` those of them that were there.
    """

    nbytes: int = 0
    waited: int = 0
    asked: int = 0
    cached: int = 0

    def plus(self, other: Streamed) -> Streamed:
        """Add up."""
        return Streamed(*map(sum, zip(self, other, strict=True)))


_NEARLY_ALL = 7 / 8
"""If a chunk asks for so many experts of a layer, it will for those of the next one, which are then read ahead."""


class ExpertCache:
    """The experts of all modules that are in memory, at most `room` bytes of them: `nbytes`.

    The module with the most in memory has its least recently used expert evicted. So every layer keeps some, although a
    step asks one layer after another and may ask for more than there is room for.
    """

    def __init__(self, memories: Sequence[ExpertMemory], room: int):
        self.memories, self.room, self.nbytes = memories, room, 0
        self._held: list[OrderedDict[int, list[Future[None]]]] = [OrderedDict() for _ in memories]
        """[module] expert -> its reads, of which none is left once it was waited for; the last used come last."""

    def ask(self, module: int, chosen: Sequence[int], reader: WeightReader) -> Streamed:
        """Have the `chosen` experts of a module in memory; count what that took.

        Raises:
            DiskError: one cannot be read.
        """
        held, count, started = self._held[module], self.memories[module].experts.number, perf_counter_ns()
        cached = sum(held.get(expert) == [] for expert in chosen)
        for expert in chosen:
            if expert in held:
                held.move_to_end(expert)
        nbytes = self._read(module, chosen, {module: {*chosen}}, reader)
        if len(chosen) >= _NEARLY_ALL * count and module + 1 < len(self.memories):
            every = range(self.memories[module + 1].experts.number)
            nbytes += self._read(module + 1, every, {module: {*held}, module + 1: {*every}}, reader)
        for expert in chosen:
            try:
                for each in held[expert]:
                    each.result()
            except BaseException:
                self._drop(module, expert)
                raise
            held[expert] = []
        return Streamed(nbytes, perf_counter_ns() - started, len(chosen), cached)

    def settle(self) -> None:
        """Drop the experts that nobody waited for, before the reader ends."""
        for module, held in enumerate(self._held):
            for expert in [expert for expert, reads in held.items() if reads]:
                self._drop(module, expert)

    def _read(
        self, module: int, experts: Sequence[int], kept: Mapping[int, AbstractSet[int]], reader: WeightReader
    ) -> int:
        """Begin to read those experts that are not in memory, while those `kept`, by module, stay -> bytes."""
        memory, held, nbytes = self.memories[module], self._held[module], 0
        for expert in experts:
            if expert in held:
                continue
            while self.nbytes + memory.experts.nbytes > self.room:
                self._evict(kept)
            held[expert] = []
            self.nbytes += memory.experts.nbytes
            try:
                for source, target in memory.parts(expert):
                    held[expert] += reader.start(source, target)
            except BaseException:
                self._drop(module, expert)  # without reads it would look as if it were there
                raise
            nbytes += memory.experts.nbytes
        return nbytes

    def _evict(self, kept: Mapping[int, AbstractSet[int]]) -> None:
        bytes_held = [len(held) * each.experts.nbytes for held, each in zip(self._held, self.memories, strict=True)]
        most_first = sorted(range(len(bytes_held)), key=bytes_held.__getitem__, reverse=True)
        evictable = ((at, each) for at in most_first for each in self._held[at] if each not in kept.get(at, ()))
        self._drop(*next(evictable))

    def _drop(self, module: int, expert: int) -> None:
        wait([each for each in self._held[module].pop(expert) if not each.cancel()])  # they write to its memory
        self.memories[module].free(expert)
        self.nbytes -= self.memories[module].experts.nbytes


_CACHES: WeakKeyDictionary[Layout, ExpertCache] = WeakKeyDictionary()  # which later runs of a model use again


class StreamedWeights:
    """Loads streamed layers into their buffers; layers are counted among those that are streamed."""

    def __init__(self, layout: Layout):
        self.layout, self.counted, self._reader = layout, Streamed(), WeightReader()
        self._loader: _Loader = _FromFiles(self._reader, layout.layers)
        if layout.streaming.where == "host":
            if not layout.host:
                layout.host = self._read_all()
            self._loader = _FromHost(layout.host, layout.device)
        if layout not in _CACHES:
            _CACHES[layout] = ExpertCache(layout.experts, layout.streaming.cache)
        self.experts = _CACHES[layout]
        self._here: list[int | None] = [None, None]  # the layer in each buffer
        self._coming: list[tuple[int, Any] | None] = [None, None]
        self._current = 0

    def need(self, at: int) -> None:
        """Wait for a layer, and begin to load the next one into the buffer of the one before."""
        self._current = at
        self._load(at)
        following = (at + 1) % len(self.layout.layers)
        if self._here[following % 2] != following and self._coming[following % 2] is None:
            self._start(following)

    def need_experts(self, module: int, chosen: Tensor) -> None:
        """Wait for those experts of a module that a router chose for tokens, numbers of any shape."""
        count = self.layout.experts[module].experts.number
        numbers = [each for each in sorted({*chosen.flatten().tolist()}) if each < count]
        self.counted = self.counted.plus(self.experts.ask(module, numbers, self._reader))

    @contextmanager
    def lent(self, number: int) -> Iterator[None]:
        """Have the weights of decoder layer `number` within this context, before it runs."""
        layers = self.layout.streaming.layers
        if number in layers:
            self._load(layers.index(number))
        try:
            yield
        finally:
            self._load(self._current)

    def taken(self) -> Streamed:
        """Return what was counted since the last look."""
        counted, self.counted = self.counted, Streamed()
        return counted

    def close(self) -> None:
        """End the threads, and close the files."""
        self.experts.settle()
        self._reader.close()

    def _read_all(self) -> list[Tensor]:
        """Read all layers into host memory, pinned for a GPU."""
        found, device = [], self.layout.device
        for at, nbytes in enumerate(self.layout.streaming.sizes):
            shape = ((nbytes,), torch.uint8)
            found.append(
                pinned_allocator(device).allocate(*shape).result() if device.type == "cuda" else host_memory(*shape)
            )
            self._loader.finish(at, found[at], self._loader.start(at, found[at]))
        return found

    def _load(self, at: int) -> None:
        buffer = at % 2
        self._arrive(buffer)
        if self._here[buffer] != at:
            self._start(at)
            self._arrive(buffer)

    def _start(self, at: int) -> None:
        self._here[at % 2] = None
        self._coming[at % 2] = at, self._loader.start(at, self.layout.buffers[at % 2])

    def _arrive(self, buffer: int) -> None:
        if (coming := self._coming[buffer]) is None:
            return
        at, begun = coming
        started = perf_counter_ns()
        try:
            self._loader.finish(at, self.layout.buffers[buffer], begun)
        except BaseException:
            self._coming[buffer] = None  # it is read again
            raise
        self._here[buffer], self._coming[buffer] = at, None
        self.counted = self.counted.plus(Streamed(self.layout.streaming.sizes[at], perf_counter_ns() - started))


@contextmanager
def streamed_weights(model: PreTrainedModel) -> Iterator[StreamedWeights | None]:
    """Let modules that need streamed weights run within this context; None if all weights are on the device.

    Within it, `awaiting_weights` loads what they need.

    Raises:
        DiskError: weights cannot be read.
    """
    if (layout := layout_of(model)) is None:
        yield None
        return
    weights = StreamedWeights(layout)
    absent = [vars(module).pop("forward") for module in layout.awaiting]
    try:
        yield weights
    finally:
        for module, forward in zip(layout.awaiting, absent, strict=True):
            module.forward = forward
        weights.close()


@contextmanager
def awaiting_weights(weights: StreamedWeights | None) -> Iterator[None]:
    """Let modules wait for their streamed weights, whatever else serves as their forward by then."""
    with ExitStack() as left:
        if weights is not None:
            layers = len(weights.layout.layers)
            for at, module in enumerate(weights.layout.awaiting):
                after = _after_layer(weights, at) if at < layers else _after_experts(weights, at - layers)
                left.enter_context(replaced(module, "forward", after(module.forward)))
        yield


_Forward = Callable[..., Any]


def _after_layer(weights: StreamedWeights, at: int) -> Callable[[_Forward], _Forward]:
    def changed(forward: _Forward) -> _Forward:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(each, Tensor) and each.requires_grad for each in (*args, *kwargs.values())):
                raise usage_error("gradients need the weights of all layers at once", "leave --weights-on out")
            weights.need(at)
            return forward(*args, **kwargs)

        return run

    return changed


def _after_experts(weights: StreamedWeights, module: int) -> Callable[[_Forward], _Forward]:
    def changed(forward: _Forward) -> _Forward:
        @functools.wraps(forward)
        def run(hidden_states: Tensor, chosen: Tensor, *args: Any, **kwargs: Any) -> Any:
            weights.need_experts(module, chosen)
            return forward(hidden_states, chosen, *args, **kwargs)

        return run

    return changed
