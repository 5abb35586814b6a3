"""Load saved KV: a prompt's first pages, from one directory or several that continue each other, a layer ahead."""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvcli.errors import KvcliError
from kvcli.kv.cache import Tiers
from kvcli.kv.pages import paged
from kvcli.kv.recurrent import cut_at
from kvcli.memory.disk_tier import DamagedError, UnbufferedFile, as_bytes, checksum
from kvcli.memory.host_pool import HostPagePool
from kvcli.memory.tiers import Footprint
from kvcli.runtime.saved.files import CHECKED_PAGES, check_layer, read_pages
from kvcli.runtime.saved.manifest import PAGE, Manifest, StateEntry, damaged, read_manifest
from kvcli.sizes import slices

READERS = 4
"""Reading threads: the disk stays busy while some of them wait for memory or compute checksums."""

READ_BYTES = 8 << 20
"""Bytes of one read, roughly: enough for the disk's full rate and to make Python's overhead small."""

AHEAD_BYTES = 8 << 20
"""Bytes to read ahead, at least one layer: small layers would leave the disk idle in between."""


class KVDamagedError(KvcliError):
    """Saved KV in `folder` differs from what was written."""

    def __init__(self, folder: Path, problem: str):
        error = damaged(folder, problem)
        super().__init__(error.what, error.hint)
        self.folder = folder


@dataclass(frozen=True)
class Segment:
    """The first `pages` pages of a directory of saved KV."""

    folder: Path
    manifest: Manifest
    pages: int

    @property
    def state_marks(self) -> list[int]:
        """Numbers of the prompt's tokens after which it has the states of layers that keep one."""
        states, end = self.manifest.states, PAGE * (self.manifest.first_page + self.pages)
        return [mark for mark in states[0].marks if mark <= end] if states else []


class _LayerRead(NamedTuple):
    """A layer that is being read: the memory of its pages, and the readers of each part, in order."""

    pages: Future[Tensor]
    parts: list[Future[tuple[slice, int, float, float]]]


class SavedKV:
    """KV of a prompt's first `length` tokens, from directories that continue each other; use it in a `with`.

    While it is open no process removes the directories. `fill` takes the layers in order. Meanwhile threads read the
    next one and verify checksums. The additional memory is that of two layers, or of `AHEAD_BYTES` more than one,
    unless methods share what was read (`keep`).

    Raises:
        KVDamagedError: on opening and filling, if a file differs from what was written.
    """

    def __init__(self, segments: Sequence[Segment], tiers: Tiers, stateful: bool = False):
        self.segments, self.tiers, self.stateful = segments, tiers, stateful
        self.length = PAGE * sum(segment.pages for segment in segments)
        self.bytes_read = 0
        self.read_ms = 0.0  # in which something was being read
        self.kept = Footprint()  # memory of the pages that methods share
        self._files: list[list[UnbufferedFile]] = []  # [segment][layer]
        self._reading: dict[int, _LayerRead] = {}
        self._pages: Future[Tensor] | None = None  # of the layer that was filled last
        self._read_until = 0.0  # on the clock
        self._stack = ExitStack()
        self._threads = ThreadPoolExecutor(READERS, "loading")
        try:
            for segment in segments:
                self._files.append(self._open(segment))
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> SavedKV:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._stack.close()

    def fill(self, layer: int, kv: Tensor) -> None:
        """Put keys and values of the first n tokens, n a multiple of `PAGE`, into kv [2, Hk, n, d]; layers in order."""
        for part, pages in self._read(layer, kv.shape[2] // PAGE):
            here = pages.to(kv.device)
            for side, rows in enumerate(kv):
                paged(rows, PAGE)[:, part].copy_(here[:, :, side].transpose(0, 1))

    def cut(self, limit: int) -> int:
        """Return the most tokens, up to `limit`, after which a prompt can continue: whole pages, or saved states."""
        if not self.stateful:
            return limit // PAGE * PAGE
        return cut_at([mark for segment in self.segments for mark in segment.state_marks], min(limit, self.length))

    def fill_state(self, layer: int, tokens: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy a layer's state after `tokens`, a result of `cut`, into its tensors."""
        segment = next(each for each in self.segments if tokens in each.state_marks)
        found = read_states(segment.folder, segment.manifest.states[layer], tokens)
        for name, tensor in tensors.items():
            tensor.copy_(found[f"{tokens}.{name}"])
            self.bytes_read += tensor.nbytes

    def pool(self) -> HostPagePool:
        """Return the pages of the layer that was filled last, for others to share; see `keep`."""
        assert self._pages is not None
        return HostPagePool.holding(self._pages.result(), self.tiers)

    def keep(self, pool: HostPagePool) -> None:
        """Leave the pages of the layer that was filled last to those who share them."""
        self.kept += pool.footprint()
        self._pages = None

    def check(self, layer: int) -> None:
        """Verify the checksums of a layer's files; layers in order."""
        for _ in self._read(layer, self.length // PAGE):
            pass

    def _open(self, segment: Segment) -> list[UnbufferedFile]:
        """Open a directory and its files, and lock it against removal; this starts the threads before any read."""
        try:
            folder = os.open(segment.folder, os.O_RDONLY | os.O_DIRECTORY)
            self._stack.callback(os.close, folder)
            fcntl.flock(folder, fcntl.LOCK_SH)
        except OSError as error:
            raise KVDamagedError(segment.folder, f"{error.filename or 'it'}: {error.strerror}") from None
        layers = range(len(segment.manifest.layers))
        return list(self._threads.map(partial(self._open_layer, segment, folder), layers))

    def _open_layer(self, segment: Segment, folder: int, layer: int) -> UnbufferedFile:
        """Open the file of a layer and check its header, on a thread."""
        manifest, name = segment.manifest, segment.manifest.layers[layer].file
        try:
            file = self._stack.enter_context(UnbufferedFile(name, folder=folder))
            check_layer(file, manifest.shape(layer), manifest.dtype)
        except DamagedError as error:
            raise KVDamagedError(segment.folder, f"{name}: {error}") from None
        except OSError as error:
            raise KVDamagedError(segment.folder, f"{name}: {error.strerror}") from None
        return file

    def _read(self, layer: int, pages: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield the first `pages` pages of a layer, part by part as they are read, and start on the next layers."""
        free, self._pages = self._pages, None
        manifest = self.segments[0].manifest
        size = pages * math.prod(manifest.shape(layer)[1:]) * manifest.dtype.itemsize
        stop = layer + 1 + max(1, AHEAD_BYTES // max(1, size))
        for at in range(layer, min(stop, len(manifest.layers))):
            if at not in self._reading:
                self._reading[at] = self._begin(at, pages, free)
                free = None
        reading = self._reading.pop(layer)
        for part in reading.parts:
            pages_read, size, begun, ended = part.result()
            self.bytes_read += size
            self.read_ms += 1000 * max(0.0, ended - max(begun, self._read_until))  # threads overlap
            self._read_until = max(ended, self._read_until)
            yield pages_read, reading.pages.result()[pages_read]
        self._pages = reading.pages

    def _begin(self, layer: int, pages: int, free: Future[Tensor] | None) -> _LayerRead:
        """Start reading the first `pages` pages of a layer, into the memory `free` if it is as large."""
        shape = (pages, *self.segments[0].manifest.shape(layer)[1:])
        if free is None or free.result().shape != shape:
            free = self.tiers.on_host_async(*shape)
        at_once = max(1, READ_BYTES // (CHECKED_PAGES * free.result()[:1].nbytes)) * CHECKED_PAGES
        parts, start = [], 0
        for number, segment in enumerate(self.segments):
            for part in slices(min(segment.pages, pages - start), at_once):
                target = slice(start + part.start, start + part.stop)
                parts.append(self._threads.submit(self._read_part, number, layer, free, target, part.start))
            start += segment.pages
        return _LayerRead(free, parts)

    def _read_part(
        self, number: int, layer: int, pages: Future[Tensor], target: slice, first: int
    ) -> tuple[slice, int, float, float]:
        """Read pages of a segment from page `first` on, on a thread; return their place, bytes, start and end time."""
        memory, begun = pages.result()[target], perf_counter()
        segment = self.segments[number]
        entry = segment.manifest.layers[layer]
        try:
            size = read_pages(self._files[number][layer], memory, first, entry.checksums)
        except (DamagedError, OSError) as error:
            raise KVDamagedError(segment.folder, f"{entry.file}: {error}") from None
        return target, size, begun, perf_counter()


def read_states(folder: Path, entry: StateEntry, tokens: int | None = None) -> dict[str, Tensor]:
    """Read the states of a layer: all of them, or those after `tokens`.

    Raises:
        KVDamagedError: the file differs from what was written.
    """
    names = [name for name in entry.checksums if tokens is None or name.startswith(f"{tokens}.")]
    try:
        with safe_open(folder / entry.file, "pt") as file:
            found = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise KVDamagedError(folder, f"{entry.file}: {error}") from None
    wrong = [name for name, tensor in found.items() if checksum(as_bytes(tensor)) != entry.checksums[name]]
    if wrong:
        raise KVDamagedError(folder, f"{entry.file}: the checksum of {wrong[0]} is wrong")
    return found


def verify(folder: Path) -> Manifest:
    """Read and verify a whole directory of saved KV; return its manifest.

    Raises:
        KvcliError: it holds no saved KV (usage), or differs from what was written (runtime).
    """
    manifest = read_manifest(folder)
    segment = Segment(folder, manifest, len(manifest.pages))
    with SavedKV([segment], Tiers.for_device(torch.device("cpu"), manifest.dtype)) as saved:
        for layer in range(len(manifest.layers)):
            saved.check(layer)
    for entry in manifest.states:
        read_states(folder, entry)
    return manifest
