"""Save a prompt's KV during the prefill, a layer at a time, on a thread of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from queue import Queue
from time import perf_counter

import torch
from safetensors.torch import save
from torch import Tensor

from kvcli.errors import KvcliError, usage_error
from kvcli.kernels.page_table import distinct
from kvcli.kernels.softmax import Softmax
from kvcli.kv.pages import paged
from kvcli.kv.recurrent import state_marks
from kvcli.memory.disk_tier import as_bytes, checksum
from kvcli.memory.host_pool import OFFLOAD_BYTES
from kvcli.memory.pinned import host_memory
from kvcli.models.layers import StateGeometry
from kvcli.runtime.saved.files import NewFolder, write_layer
from kvcli.runtime.saved.manifest import (
    FORMAT,
    MANIFEST,
    PAGE,
    Identity,
    LayerEntry,
    Manifest,
    PromptRead,
    StateEntry,
    page_hashes,
    read_manifest,
)
from kvcli.sizes import slices

_BUFFERS = 2  # one is filled while the other is written


@dataclass(frozen=True)
class Saving:
    """Data to save: whole pages of the prompt `ids` from page `first` on, which follows the page hashed `parent`."""

    ids: Sequence[int]
    identity: Identity
    asked: PromptRead
    first: int
    parent: str
    states: Sequence[StateGeometry] = ()
    reading: str = "exact"

    @property
    def pages(self) -> int:
        """Number of pages."""
        return len(self.ids) // PAGE - self.first

    @property
    def state_marks(self) -> list[int]:
        """Numbers of tokens after which the states of layers that keep one are saved."""
        return [mark for mark in state_marks(self.states, len(self.ids)) if mark > self.first * PAGE]

    @property
    def nbytes(self) -> int:
        """Bytes of the states."""
        return len(self.state_marks) * sum(layer.nbytes for layer in self.states)


class KVWriter:
    """Takes a prompt's KV layer by layer, as a `PrefillConsumer`, and writes it in the background.

    `target` returns the directory to save to, given the manifest. A failure ends the saving, never the run: see
    `finish`. The additional memory is that of two layers.

    Raises:
        KvcliError: the directory cannot be made (usage).
    """

    query_rows = 0

    def __init__(self, saving: Saving, parent: Path, target: Callable[[Manifest], Path], cached: bool = False):
        self.saving, self.target, self.cached = saving, target, cached
        try:
            self.folder = NewFolder(parent)
        except OSError as error:
            raise usage_error(f"{parent}: cannot be written: {error.strerror}", "name another directory") from None
        self.entries: list[LayerEntry] = []
        self.failure: OSError | None = None
        self.path: Path | None = None  # its final directory, once complete
        self.bytes_written, self.write_ms = 0, 0.0
        self._free: Queue[Tensor | None] = Queue()
        for _ in range(_BUFFERS):
            self._free.put(None)
        self._filled: Queue[Tensor | dict[str, Tensor] | None] = Queue()
        self.state_marks = saving.state_marks
        self.state_entries: list[StateEntry] = []
        self._states: dict[str, Tensor] = {}  # of the layer whose states are being taken
        self._layer = 0
        self._thread = threading.Thread(target=self._work, name="saving", daemon=True)
        self._thread.start()

    def observe(self, layer: int, q: Tensor, k: Tensor, softmax: Softmax) -> None:
        """Ignore queries: they are not saved."""

    def prefill(self, layer: int, k: Tensor, v: Tensor, q: Tensor, softmax: Softmax) -> None:  # noqa: ARG002
        """Take the pages of a layer's k, v [Hk, s, d]."""
        if self.failure is not None:
            return
        parts = distinct(k, v)
        shape = (self.saving.pages, k.shape[0], len(parts), PAGE, k.shape[2])
        buffer = self._free.get()
        if buffer is None or buffer.shape != shape:
            buffer = host_memory(shape, k.dtype)
        tokens = slice(self.saving.first * PAGE, (self.saving.first + self.saving.pages) * PAGE)
        # A GPU changes the layout itself, so that contiguous copies cross the bus, in small parts to save memory.
        at_once = max(1, OFFLOAD_BYTES // max(1, buffer[:1].nbytes) if k.is_cuda else len(buffer))
        for some in slices(len(buffer), at_once):
            target = torch.empty_like(buffer[some], device=k.device) if k.is_cuda else buffer[some]
            for part, rows in enumerate(parts):
                target[:, :, part].copy_(paged(rows[:, tokens], PAGE)[:, some].transpose(0, 1))
            if k.is_cuda:
                buffer[some].copy_(target)
        self._filled.put(buffer)

    def take_state(self, layer: int, tokens: int, tensors: Mapping[str, Tensor]) -> None:
        """Take a layer's state after `tokens`, if it is one to be saved; layer by layer."""
        if tokens not in self.state_marks or self.failure is not None:
            return
        if layer != self._layer:
            self._filled.put(self._states)
            self._layer, self._states = layer, {}
        for name, tensor in tensors.items():
            self._states[f"{tokens}.{name}"] = tensor.to("cpu", copy=True)

    def finish(self) -> None:
        """Wait until all layers are written, and complete the directory.

        Raises:
            KvcliError: it could not be written (runtime), or its name was taken meanwhile by something else (usage).
        """
        if self._states:
            self._filled.put(self._states)
        self._filled.put(None)
        self._thread.join()
        try:
            if self.failure is not None:
                raise self.failure
            manifest = self._manifest()
            sealed = self.folder.path / f"{MANIFEST}.new"
            _write(sealed, manifest.sealed().encode())
            sealed.rename(self.folder.path / MANIFEST)
            target = self.target(manifest)
            if not self.folder.commit(target):
                self._check_same(target, manifest)
            self.path = target
        except OSError as error:
            self.folder.abandon()
            what = f"the KV of {self.saving.asked.source} was not saved: {error.strerror}"
            raise KvcliError(what, "free some space, or name another directory") from None

    def abandon(self) -> None:
        """Discard everything."""
        self.failure = self.failure or OSError(0, "given up")
        self._filled.put(None)
        self._thread.join()
        self.folder.abandon()

    def _work(self) -> None:
        while (filled := self._filled.get()) is not None:
            if self.failure is None:
                begun = perf_counter()
                try:
                    if isinstance(filled, Tensor):
                        self._write_layer(filled)
                    else:
                        self._write_states(filled)
                except OSError as error:
                    self.failure = error
                self.write_ms += 1000 * (perf_counter() - begun)
            if isinstance(filled, Tensor):
                self._free.put(filled)

    def _write_layer(self, pages: Tensor) -> None:
        name = f"layer-{len(self.entries):04}.safetensors"
        checksums = write_layer(self.folder.path / name, pages)
        self.entries.append(
            LayerEntry(
                file=name,
                num_kv_heads=pages.shape[1],
                head_dim=pages.shape[4],
                parts=pages.shape[2],
                checksums=checksums,
            )
        )
        self.bytes_written += pages.nbytes

    def _write_states(self, tensors: dict[str, Tensor]) -> None:
        name = f"state-{len(self.state_entries):04}.safetensors"
        _write(self.folder.path / name, save(tensors))
        checksums = {key: checksum(as_bytes(tensor)) for key, tensor in tensors.items()}
        self.state_entries.append(StateEntry(file=name, checksums=checksums))
        self.bytes_written += sum(tensor.nbytes for tensor in tensors.values())

    def _manifest(self) -> Manifest:
        saving = self.saving
        tokens = list(saving.ids[saving.first * PAGE : (saving.first + saving.pages) * PAGE])
        return Manifest(
            format=FORMAT if self.state_entries else 1,
            kvcli=version("kvcli"),
            model=saving.identity,
            reading=saving.reading,
            first_page=saving.first,
            parent=saving.parent,
            tokens=tokens,
            pages=page_hashes(saving.parent, tokens),
            layers=self.entries,
            states=self.state_entries,
            asked=saving.asked,
        )

    def _check_same(self, target: Path, manifest: Manifest) -> None:
        """Accept a directory that another process has saved to the same place, if it holds the same pages."""
        if read_manifest(target).pages != manifest.pages:
            raise usage_error(f"{target}: holds something else now", "name another directory")


def check_target(folder: Path) -> None:
    """Refuse to save to a directory that is neither new nor empty.

    Raises:
        KvcliError: it holds something, or cannot be made (usage).
    """
    hint = "name a new directory"
    try:
        if folder.is_dir():
            if (folder / MANIFEST).exists():
                raise usage_error(f"{folder}: holds saved KV already", f"{hint}, or use it with --kv {folder}")
            if any(folder.iterdir()):
                raise usage_error(f"{folder}: holds something else", hint)
        elif folder.exists():
            raise usage_error(f"{folder}: not a directory", hint)
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise usage_error(f"{folder}: cannot be written: {error.strerror}", hint) from None


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
