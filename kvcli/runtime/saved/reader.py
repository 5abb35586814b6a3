"""Loading saved KV: a prompt's first pages from one directory or several that continue each other, a layer ahead."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from time import perf_counter

import torch
from torch import Tensor

from kvcli.errors import KvcliError
from kvcli.runtime.saved.layer_file import DamagedError, UnbufferedFile, aligned, check_layer, read_pages
from kvcli.runtime.saved.manifest import PAGE, Manifest, damaged, read_manifest
from kvcli.store.cache import Footprint, Tiers
from kvcli.store.host_pool import HostPagePool
from kvcli.store.pages import paged


class KVDamagedError(KvcliError):
    """Saved KV is not as it was written; `folder` is where."""

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


class SavedKV:
    """KV of a prompt's first `length` tokens, from directories that continue each other; use it in a `with`.

    While it is open no process removes the directories. `fill` gives the layers in order; a thread reads the next one
    meanwhile. The memory beside the run's is that of two layers, unless methods share what was read (`keep`).

    Raises:
        KVDamagedError: opening and filling, where a file is not as it was written.
    """

    def __init__(self, segments: Sequence[Segment], tiers: Tiers):
        self.segments, self.tiers = segments, tiers
        self.length = PAGE * sum(segment.pages for segment in segments)
        self.bytes_read, self.read_ms, self.waited_ms = 0, 0.0, 0.0
        self.kept = Footprint()  # what methods share of what was read
        self._files: list[list[UnbufferedFile]] = []  # [segment][layer]
        self._ready: Queue[Tensor | KvcliError] = Queue(maxsize=1)
        self._free: Queue[Tensor] = Queue()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._pages: Tensor | None = None  # of the layer that was filled last
        self._stack = ExitStack()
        try:
            for segment in segments:
                self._open(segment)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> SavedKV:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        while self._thread is not None and self._thread.is_alive():
            try:
                self._ready.get(timeout=0.05)
            except Empty:
                continue
        self._stack.close()

    def fill(self, layer: int, kv: Tensor) -> None:  # noqa: ARG002
        """Put keys and values of the first n tokens, n a multiple of `PAGE`, into kv [2, Hk, n, d]; layers in order."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, args=(kv.shape[2] // PAGE,), daemon=True)
            self._thread.start()
        begun = perf_counter()
        if self._pages is not None:
            self._free.put(self._pages)
        found = self._ready.get()
        self.waited_ms += 1000 * (perf_counter() - begun)
        if isinstance(found, KvcliError):
            raise found
        self._pages = found
        pages = found.to(kv.device)
        for part, rows in enumerate(kv):
            paged(rows, PAGE).copy_(pages[:, :, part].transpose(0, 1))

    def pool(self) -> HostPagePool:
        """Give the pages of the layer that was filled last, for others to share; see `keep`."""
        assert self._pages is not None
        return HostPagePool.holding(self._pages, self.tiers)

    def keep(self, pool: HostPagePool) -> None:
        """Leave the pages of the layer that was filled last to those who share them."""
        self.kept += pool.footprint()
        self._pages = None

    def check(self, layer: int) -> None:
        """Hold a layer's files against their checksums."""
        self._free.put(self._read_layer(layer, self.length // PAGE))

    def _open(self, segment: Segment) -> None:
        """Open a directory and all its files, and keep it from being removed."""
        manifest, files = segment.manifest, []
        try:
            folder = os.open(segment.folder, os.O_RDONLY | os.O_DIRECTORY)
            self._stack.callback(os.close, folder)
            fcntl.flock(folder, fcntl.LOCK_SH)
            for layer, entry in enumerate(manifest.layers):
                file = self._stack.enter_context(UnbufferedFile(entry.file, folder=folder))
                check_layer(file, manifest.shape(layer), manifest.dtype)
                files.append(file)
        except DamagedError as error:
            raise KVDamagedError(segment.folder, f"{entry.file}: {error}") from None
        except OSError as error:
            raise KVDamagedError(segment.folder, f"{error.filename or 'it'}: {error.strerror}") from None
        self._files.append(files)

    def _read(self, pages: int) -> None:
        """Read the first `pages` pages of every layer, on a thread."""
        for layer in range(len(self.segments[0].manifest.layers)):
            try:
                begun = perf_counter()
                found: Tensor | KvcliError = self._read_layer(layer, pages)
                self.read_ms += 1000 * (perf_counter() - begun)
            except KvcliError as error:
                found = error
            if self._closing:
                return
            self._ready.put(found)
            if isinstance(found, KvcliError):
                return

    def _read_layer(self, layer: int, pages: int) -> Tensor:
        first = self.segments[0].manifest
        whole = self._buffer((pages, *first.shape(layer)[1:]), first.dtype)
        start = 0
        for segment, files in zip(self.segments, self._files, strict=True):
            count = min(segment.pages, pages - start)
            if count <= 0:
                break
            entry = segment.manifest.layers[layer]
            try:
                self.bytes_read += read_pages(files[layer], whole[start : start + count], 0, entry.checksums)
            except (DamagedError, OSError) as error:
                raise KVDamagedError(segment.folder, f"{entry.file}: {error}") from None
            start += count
        return whole

    def _buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Take memory that is not used any more, or new one; pinned where the host's is."""
        try:
            used = self._free.get_nowait()
            if used.shape == shape:
                return used
        except Empty:
            pass
        if self.tiers.pinned is not None:
            return self.tiers.on_host(*shape)
        return aligned(shape, dtype)


def verify(folder: Path) -> Manifest:
    """Read a directory of saved KV whole; returns its manifest.

    Raises:
        KvcliError: it is none (usage), or not as it was written (runtime).
    """
    manifest = read_manifest(folder)
    segment = Segment(folder, manifest, len(manifest.pages))
    with SavedKV([segment], Tiers.for_device(torch.device("cpu"), manifest.dtype)) as saved:
        for layer in range(len(manifest.layers)):
            saved.check(layer)
    return manifest
