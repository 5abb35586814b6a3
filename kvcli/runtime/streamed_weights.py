"""Bring the layers of a model to its device, each while the layer before it is computed (`kvcli.models.streamed`)."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcli.errors import usage_error
from kvcli.memory.disk_tier import ALIGNMENT, READ_BYTES, DamagedError, DiskError, UnbufferedFile
from kvcli.memory.pinned import host_memory, pinned_allocator
from kvcli.models.auto import layers_of
from kvcli.models.streamed import Layout, Source, layout_of
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


class _Bringing(Protocol):
    """Brings layers to their places."""

    def start(self, at: int, place: Tensor) -> Any:
        """Begin to bring the layer `at`; whatever is computed with the place so far must not see it."""

    def finish(self, at: int, place: Tensor, begun: Any) -> None:
        """Wait for what `start` returned."""


class _FromFiles:
    """Brings layers from files; `weights` has the weights of each, with the beginnings of their bytes in its place."""

    def __init__(self, reader: WeightReader, weights: Sequence[Sequence[tuple[Source, int]]]):
        self.reader, self.weights = reader, weights
        self._reads: dict[int, list[Future[None]]] = {}  # the latest into each place, by its address

    def start(self, at: int, place: Tensor) -> list[Future[None]]:
        begun = self._reads.setdefault(place.data_ptr(), [])
        wait(begun)  # a run that was interrupted left them
        begun[:] = [each for source, target in self._targets(at, place) for each in self.reader.start(source, target)]
        return begun

    def finish(self, at: int, place: Tensor, begun: Any) -> None:
        self.reader.finish(begun, list(self._targets(at, place)))

    def _targets(self, at: int, place: Tensor) -> Iterator[tuple[Source, Tensor]]:
        return ((source, place[begin : begin + source.nbytes]) for source, begin in self.weights[at])


class _FromHost:
    """Brings layers from host memory, on a GPU by a stream of its own."""

    def __init__(self, layers: Sequence[Tensor], device: torch.device):
        self.layers, self.device = layers, device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def start(self, at: int, place: Tensor) -> torch.cuda.Event | None:
        target = place[: len(self.layers[at])]
        if self.stream is None:
            target.copy_(self.layers[at])
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(self.layers[at], non_blocking=True)
            copied: torch.cuda.Event = self.stream.record_event()
        return copied

    def finish(self, at: int, place: Tensor, begun: Any) -> None:  # noqa: ARG002
        if begun is not None:
            torch.cuda.current_stream(self.device).wait_event(begun)


class Passed(NamedTuple):
    """Bytes of weights brought to the device, and nanoseconds in which the run waited for them."""

    nbytes: int = 0
    waited: int = 0


class StreamedWeights:
    """What brings layers to their places; layers are counted among those that pass."""

    def __init__(self, layout: Layout):
        self.layout, self.passed, self._reader = layout, Passed(), WeightReader()
        self._bringing: _Bringing = _FromFiles(self._reader, layout.layers)
        if layout.streaming.where == "host":
            if not layout.host:
                layout.host = self._read_all()
            self._bringing = _FromHost(layout.host, layout.device)
        self._here: list[int | None] = [None, None]  # the layer in each place
        self._coming: list[tuple[int, Any] | None] = [None, None]
        self._current = 0

    def need(self, at: int) -> None:
        """Wait for a layer, and begin to bring the next one to the place of the one before."""
        self._current = at
        self._bring(at)
        following = (at + 1) % len(self.layout.layers)
        if self._here[following % 2] != following and self._coming[following % 2] is None:
            self._start(following)

    @contextmanager
    def lent(self, number: int) -> Iterator[None]:
        """Have the weights of decoder layer `number` within this context, before its turn."""
        layers = self.layout.streaming.layers
        if number in layers:
            self._bring(layers.index(number))
        try:
            yield
        finally:
            self._bring(self._current)

    def taken(self) -> Passed:
        """Return what was counted since the last look."""
        counted, self.passed = self.passed, Passed()
        return counted

    def close(self) -> None:
        """End the threads, and close the files."""
        self._reader.close()

    def _read_all(self) -> list[Tensor]:
        """Read all layers into host memory, pinned for a GPU."""
        found, device = [], self.layout.device
        for at, nbytes in enumerate(self.layout.streaming.sizes):
            shape = ((nbytes,), torch.uint8)
            found.append(
                pinned_allocator(device).allocate(*shape).result() if device.type == "cuda" else host_memory(*shape)
            )
            self._bringing.finish(at, found[at], self._bringing.start(at, found[at]))
        return found

    def _bring(self, at: int) -> None:
        place = at % 2
        self._arrive(place)
        if self._here[place] != at:
            self._start(at)
            self._arrive(place)

    def _start(self, at: int) -> None:
        self._here[at % 2] = None
        self._coming[at % 2] = at, self._bringing.start(at, self.layout.places[at % 2])

    def _arrive(self, place: int) -> None:
        if (coming := self._coming[place]) is None:
            return
        at, begun = coming
        started = perf_counter_ns()
        try:
            self._bringing.finish(at, self.layout.places[place], begun)
        except BaseException:
            self._coming[place] = None  # it is read again
            raise
        self._here[place], self._coming[place] = at, None
        nbytes, waited = self.passed
        self.passed = Passed(nbytes + self.layout.streaming.sizes[at], waited + perf_counter_ns() - started)


@contextmanager
def streamed_weights(model: PreTrainedModel) -> Iterator[StreamedWeights | None]:
    """Let the layers of a model that pass run within this context; None if all of its weights stay.

    Within it, `in_turn` brings their weights.

    Raises:
        DiskError: weights cannot be read.
    """
    if (layout := layout_of(model)) is None:
        yield None
        return
    weights, layers = StreamedWeights(layout), layers_of(model)
    passing = [layers[number] for number in layout.streaming.layers]
    absent = [vars(layer).pop("forward") for layer in passing]
    try:
        yield weights
    finally:
        for layer, forward in zip(passing, absent, strict=True):
            layer.forward = forward
        weights.close()


@contextmanager
def in_turn(model: PreTrainedModel, weights: StreamedWeights | None) -> Iterator[None]:
    """Let layers that pass wait for their weights, whatever else serves as their forward by then."""
    with ExitStack() as left:
        for at, number in enumerate(() if weights is None else weights.layout.streaming.layers):
            layer = layers_of(model)[number]
            assert weights is not None
            left.enter_context(replaced(layer, "forward", _after_need(weights, at, layer.forward)))
        yield


def _after_need(weights: StreamedWeights, at: int, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(each, Tensor) and each.requires_grad for each in (*args, *kwargs.values())):
            raise usage_error("gradients need the weights of all layers at once", "leave --weights-on out")
        weights.need(at)
        return forward(*args, **kwargs)

    return run
