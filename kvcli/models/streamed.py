"""Weights that do not fit the device: its decoder layers are streamed through two buffers, read one layer ahead.

Each layer uses the same buffer every time, and its weights are views of it. So whoever refers to a weight, a module or
a loop, finds it there once the layer was read (`kvcli.runtime.streamed_weights`). On a CPU layers are read from the
model's files, past the system's cache; on a GPU they are copied from pinned host memory, by a stream of its own. What
is small or used by several layers stays on the device: norms, biases, convolutions, embeddings and the head.

On a CPU only those experts of a layer are read that its router chooses, and the last ones stay cached. The tensor of
all experts has its whole range of addresses, of which the system backs only the pages of cached experts. So
transformers' own code runs on it unchanged, with the same numbers.
"""

from __future__ import annotations

import mmap
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvcli.compat import is_routed
from kvcli.errors import ExitCode, KvcliError, usage_error
from kvcli.models.auto import layers_of
from kvcli.models.weights import LATENT_UP, LINE, PackedForm, WeightForm, room_for
from kvcli.sizes import format_bytes

WeightsOn = Literal["device", "host", "disk"]
"""Where the weights of decoder layers lie between their uses."""

_FEWEST = 4  # layers, of which two buffers hold less than all
_AT_ONCE = 8 << 20  # bytes
_NORESERVE = 0x4000  # MAP_NORESERVE on Linux, which Python names from 3.13 on


class Experts(NamedTuple):
    """A module of a `number` of experts that a router chooses from: its name, its weights [number, ...] by name."""

    name: str
    weights: tuple[str, ...]
    number: int
    nbytes: int
    """Bytes of one expert in all of these weights."""

    @property
    def total(self) -> int:
        """Bytes of all of them."""
        return self.number * self.nbytes


@dataclass(frozen=True)
class WeightStreaming:
    """Which layers are streamed, from `where`: the names of their weights, their bytes, their numbers.

    Of `experts` only those that a router chooses are read, and `cache` bytes of them stay. `held` are the bytes of
    weights on the device: those that stay, two buffers, and the cache. `limit` is what they may take, if that was said.
    """

    where: WeightsOn
    names: tuple[tuple[str, ...], ...]
    sizes: tuple[int, ...]
    layers: tuple[int, ...]
    held: int
    limit: int | None = None
    experts: tuple[Experts, ...] = ()
    cache: int = 0

    @property
    def per_pass(self) -> int:
        """Bytes that are read once for each use of all layers, without experts that are chosen."""
        return sum(self.sizes)

    @property
    def of_experts(self) -> int:
        """Bytes of all experts that are chosen from."""
        return sum(each.total for each in self.experts)

    @property
    def on_host(self) -> int:
        """Bytes of weights in the host memory of a GPU."""
        return self.per_pass if self.where == "host" else 0

    def per_step(self, active: float, rows: int) -> int:
        """Estimate the bytes that a step of `rows` reads if a token uses the part `active` of the experts, at random.

        Real routers prefer some experts, which the cache holds, so that less is read.
        """
        asked = self.of_experts * (1 - max(0.0, 1 - active) ** rows)
        return self.per_pass + round(asked * (1 - self.cache / self.of_experts) if self.experts else 0)

    @classmethod
    def of(
        cls, model: PreTrainedModel, form: WeightForm | None, total: int, where: WeightsOn, limit: int | None = None
    ) -> WeightStreaming | None:
        """Choose the layers of a model on the meta device whose weights take `total` bytes; None if all fit `limit`.

        As many layers stay as `limit` bytes of the device hold, by default as few as possible: an even number is
        streamed, so that the first one can be read while the last one is computed. The cache of experts holds those of
        two layers, and takes what the layers leave of `limit`.

        Raises:
            KvcliError: `limit` is too small (will not fit), or the weights of such a model are not streamed (usage).
        """
        if form is not None and (form.widened or not isinstance(form, PackedForm)):
            what = f"--weights-on {where} takes weights as they are in the files, not {form.label}"
            raise usage_error(what, "leave one of them out")
        held = {} if form is None else form.held(model)
        every = {name: held.get(name, weight.nbytes) for name, weight in model.named_parameters()}
        experts = tuple(_routed(model, every)) if where == "disk" else ()
        chosen = {name for each in experts for name in each.weights}
        found = ((number, tuple(n for n in names if n not in chosen)) for number, names in _streamable(model))
        own = [(number, names, _size([every[name] for name in names])) for number, names in found if names]
        if len(own) < _FEWEST:
            what = f"--weights-on {where} needs {_FEWEST} layers with matrices of their own; this model has {len(own)}"
            raise usage_error(what, "leave it out")
        if limit is not None and limit >= total:
            return None
        of_experts = sum(each.total for each in experts)
        cache = min(of_experts, 2 * max((each.total for each in experts), default=0))

        def holding(stay: int) -> int:
            sizes = [size for *_, size in own[stay:]]
            return total - sum(sizes) + 2 * max(sizes) - of_experts + cache

        few = len(own) % 2
        if limit is not None and limit < holding(few):
            raise KvcliError(
                f"--weights-memory {format_bytes(limit)} is too little for these weights",
                f"give {format_bytes(holding(few) + (1 << 20))} at least: what stays, and buffers for two layers",
                ExitCode.WILL_NOT_FIT,
            )
        stay = max(n for n in range(few, len(own) - 1, 2) if n == few or (limit is not None and holding(n) <= limit))
        more = 0 if limit is None else min(of_experts - cache, limit - holding(stay))
        numbers, names, sizes = zip(*own[stay:], strict=True)
        return cls(where, names, sizes, numbers, holding(stay) + more, limit, experts, cache + more)


def _streamable(model: PreTrainedModel) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield each decoder layer's number with the names of its matrices that nothing else uses."""
    names = defaultdict[int, list[str]](list)
    for name, weight in model.named_parameters(remove_duplicate=False):
        names[id(weight)].append(name)
    for number, layer in enumerate(layers_of(model)):
        found = []
        for within, module in layer.named_modules():
            of_experts = not isinstance(module, nn.Conv1d)
            for weight in module.parameters(recurse=False):
                matrix = (isinstance(module, nn.Linear) and weight.dim() == 2) or (of_experts and weight.dim() == 3)
                if matrix and not within.endswith(LATENT_UP) and len(names[id(weight)]) == 1:
                    found += names[id(weight)]
        yield number, tuple(found)


def _routed(model: PreTrainedModel, nbytes: Mapping[str, int]) -> Iterator[Experts]:
    """Yield the modules whose experts are chosen by a router and are whole pages of memory each."""
    inside = {id(module) for layer in layers_of(model) for module in layer.modules()}
    for name, module in model.named_modules():
        if id(module) not in inside or not is_routed(module):
            continue
        weights = tuple(f"{name}.{own}" for own, weight in module.named_parameters(recurse=False) if weight.dim() == 3)
        counts = {len(model.get_parameter(each)) for each in weights}
        if len(counts) == 1 and all(nbytes[each] % (max(counts) * mmap.PAGESIZE) == 0 for each in weights):
            yield Experts(name, weights, max(counts), sum(nbytes[each] for each in weights) // max(counts))


def _size(sizes: Sequence[int]) -> int:
    """Return the bytes of a buffer for weights of these sizes, each of which begins with a cache line."""
    return sum(-(-size // LINE) * LINE for size in sizes)


def check_place(where: WeightsOn, limit: int | None, devices: Sequence[torch.device]) -> None:
    """Refuse a place from which weights are not streamed to these devices; raises KvcliError (usage)."""
    if where == "device":
        if limit is not None:
            raise usage_error("--weights-memory needs --weights-on host or disk", "say where the other weights lie")
        return
    if len(devices) > 1:
        raise usage_error(f"--weights-on {where} needs one device, but --device names several", "name one")
    device = devices[0]
    if device.type == "cpu" and where == "host":
        raise usage_error("--weights-on host: host memory is the device of a CPU", "use --weights-on disk")
    if device.type == "cuda" and where == "disk":
        raise usage_error("--weights-on disk serves a CPU, not a GPU", "use --weights-on host")


class FilePart(NamedTuple):
    """Consecutive bytes of a file."""

    file: Path
    offset: int
    nbytes: int


class Source(NamedTuple):
    """Where a weight's bytes are, piece after piece, and what is to be done to them once they are read."""

    pieces: Sequence[FilePart]
    settle: Callable[[Tensor], None] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return sum(piece.nbytes for piece in self.pieces)

    def part(self, begin: int, nbytes: int) -> Source:
        """Return a part of a weight that is not changed once it is read."""
        found, at = [], 0
        for path, offset, size in self.pieces:
            first, last = max(begin, at), min(begin + nbytes, at + size)
            if first < last:
                found.append(FilePart(path, offset + first - at, last - first))
            at += size
        return Source(found)

    def read(self, room: Tensor | None = None, keep: bool = True) -> Tensor:
        """Read the bytes into a `room` [n] in host memory, or make one; the system may `keep` them in its cache.

        Raises:
            KvcliError: a file ends too early.
        """
        room = torch.empty(self.nbytes, dtype=torch.uint8) if room is None else room
        at = 0
        for path, offset, nbytes in self.pieces:
            with path.open("rb", buffering=0) as file:
                for begin in range(0, nbytes, _AT_ONCE):
                    some = min(_AT_ONCE, nbytes - begin)
                    file.seek(offset + begin)
                    target: Any = room[at + begin : at + begin + some].numpy()
                    if file.readinto(target) < some:
                        raise KvcliError(f"{path} is cut off", "download that file again")
                    if not keep:
                        os.posix_fadvise(file.fileno(), offset + begin, some, os.POSIX_FADV_DONTNEED)
            at += nbytes
        if self.settle is not None:
            self.settle(room)
        return room


class Layout:
    """The buffers of a model's streamed layers on its device: `rooms` has the bytes of their weights there, by name.

    `layers` has the weights of each streamed layer, with where their bytes begin in its buffer.
    """

    def __init__(self, streaming: WeightStreaming, sources: Mapping[str, Source], device: torch.device):
        self.streaming, self.sources, self.device = streaming, sources, device
        size = max(streaming.sizes)
        buffers = room_for([size, size], device)
        self.buffers = [
            torch.empty(size, dtype=torch.uint8, device=device) if each is None else each for each in buffers
        ]
        self.host: list[Tensor] = []  # the layers in a GPU's host memory
        self.rooms: dict[str, Tensor] = {}
        self.layers: list[list[tuple[Source, int]]] = []
        self.awaiting: list[nn.Module] = []
        """The modules that need weights to be read: streamed layers, then those of `experts`."""
        for at, names in enumerate(streaming.names):
            begin = 0
            self.layers.append([])
            for name in names:
                source = sources[name]
                self.rooms[name] = self.buffers[at % 2][begin : begin + source.nbytes]
                self.layers[at].append((source, begin))
                begin += _size([source.nbytes])
        self.experts = [ExpertMemory(each, sources) for each in streaming.experts]
        for memory in self.experts:
            self.rooms |= memory.rooms

    def attach(self, model: PreTrainedModel) -> None:
        """Let what needs streamed weights refuse to run, until something reads them."""
        layers = layers_of(model)
        self.awaiting = [layers[number] for number in self.streaming.layers]
        self.awaiting += [model.get_submodule(each.name) for each in self.streaming.experts]
        for module in self.awaiting:
            module.forward = _absent
        _LAYOUTS[model] = self


class ExpertMemory:
    """Addresses for all experts of a module, and memory for those that are used: `rooms` has all bytes by name.

    Raises:
        KvcliError: the system refuses so many addresses (will not fit).
    """

    def __init__(self, experts: Experts, sources: Mapping[str, Source]):
        self.experts, self.rooms = experts, dict[str, Tensor]()
        self._weights: list[tuple[mmap.mmap, Source, Tensor, int]] = []
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        for name in experts.weights:
            source = sources[name]
            try:
                memory = mmap.mmap(-1, source.nbytes, flags=flags)
                memory.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page would also back the neighbours of an expert
            except OSError as error:
                what = f"the system refuses {format_bytes(source.nbytes)} of addresses for experts: {error.strerror}"
                raise KvcliError(
                    what, "allow overcommit (vm.overcommit_memory 0 or 1)", ExitCode.WILL_NOT_FIT
                ) from None
            room = torch.frombuffer(memory, dtype=torch.uint8)
            self.rooms[name] = room
            self._weights.append((memory, source, room, source.nbytes // experts.number))

    def parts(self, expert: int) -> Iterator[tuple[Source, Tensor]]:
        """Yield where the weights of an expert are read from, and to."""
        for _, source, room, nbytes in self._weights:
            yield source.part(expert * nbytes, nbytes), room[expert * nbytes :][:nbytes]

    def free(self, expert: int) -> None:
        """Give the memory of an expert back to the system."""
        for memory, _, _, nbytes in self._weights:
            memory.madvise(mmap.MADV_DONTNEED, expert * nbytes, nbytes)


_LAYOUTS: WeakKeyDictionary[nn.Module, Layout] = WeakKeyDictionary()


def layout_of(model: PreTrainedModel) -> Layout | None:
    """Return the buffers of a model's streamed layers; None if all of its weights are on the device."""
    return _LAYOUTS.get(model)


def _absent(*_: object, **__: object) -> None:
    raise usage_error("only kvcli's own steps read the weights of --weights-on", "leave it out here")
