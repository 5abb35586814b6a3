"""Weights that do not fit the device: its decoder layers pass through two places there, read one ahead of their use.

Each layer has one of the two places for good, and its weights are views of it. So whoever refers to a weight, a module
or a loop, finds it there once the layer's turn has come (`kvcli.runtime.streamed_weights`). On a CPU a layer comes from
the model's files, past the system's cache; on a GPU from pinned host memory, by a stream of its own. What is small or
used by several layers stays on the device: norms, biases, convolutions, embeddings and the head.
"""

from __future__ import annotations

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

from kvcli.errors import ExitCode, KvcliError, usage_error
from kvcli.models.auto import layers_of
from kvcli.models.weights import LATENT_UP, LINE, PackedForm, WeightForm, room_for
from kvcli.sizes import format_bytes

WeightsOn = Literal["device", "host", "disk"]
"""Where the weights of decoder layers lie between their uses."""

_FEWEST = 4  # layers, of which two places hold less than all
_AT_ONCE = 8 << 20  # bytes


@dataclass(frozen=True)
class InTurn:
    """Which layers pass through the device, from `where`: the names of their weights, their bytes, their numbers.

    `held` are the bytes of weights on the device: those that stay, and two places. `limit` is what they may take, if
    that was said.
    """

    where: WeightsOn
    names: tuple[tuple[str, ...], ...]
    sizes: tuple[int, ...]
    layers: tuple[int, ...]
    held: int
    limit: int | None = None

    @property
    def a_pass(self) -> int:
        """Bytes that a pass over all layers brings to the device."""
        return sum(self.sizes)

    @property
    def on_host(self) -> int:
        """Bytes of weights in the host memory of a GPU."""
        return self.a_pass if self.where == "host" else 0

    @classmethod
    def of(
        cls, model: PreTrainedModel, form: WeightForm | None, total: int, where: WeightsOn, limit: int | None = None
    ) -> InTurn | None:
        """Choose the layers of a model on the meta device whose weights take `total` bytes; None if all fit `limit`.

        As many layers stay as `limit` bytes of the device hold, by default as few as possible: an even number passes,
        so that the first one can be read while the last one is computed.

        Raises:
            KvcliError: `limit` is too small (will not fit), or weights do not pass through such a model (usage).
        """
        if form is not None and (form.widened or not isinstance(form, PackedForm)):
            what = f"--weights-on {where} takes weights as they are in the files, not {form.label}"
            raise usage_error(what, "leave one of them out")
        held = {} if form is None else form.held(model)
        every = {name: held.get(name, weight.nbytes) for name, weight in model.named_parameters()}
        own = [(number, names, _size([every[name] for name in names])) for number, names in _passing(model) if names]

        def holding(stay: int) -> int:
            sizes = [size for *_, size in own[stay:]]
            return total - sum(sizes) + 2 * max(sizes)

        if len(own) < _FEWEST:
            what = f"--weights-on {where} needs {_FEWEST} layers with matrices of their own; this model has {len(own)}"
            raise usage_error(what, "leave it out")
        if limit is not None and limit >= total:
            return None
        few = len(own) % 2
        if limit is not None and limit < holding(few):
            raise KvcliError(
                f"--weights-memory {format_bytes(limit)} is too little for these weights",
                f"give {format_bytes(holding(few) + (1 << 20))} at least: what stays, and two places for layers",
                ExitCode.WILL_NOT_FIT,
            )
        stay = max(n for n in range(few, len(own) - 1, 2) if n == few or (limit is not None and holding(n) <= limit))
        numbers, names, sizes = zip(*own[stay:], strict=True)
        return cls(where, names, sizes, numbers, holding(stay), limit)


def _passing(model: PreTrainedModel) -> Iterator[tuple[int, tuple[str, ...]]]:
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


def _size(sizes: Sequence[int]) -> int:
    """Return the bytes of a place for weights of these sizes, each of which begins with a cache line."""
    return sum(-(-size // LINE) * LINE for size in sizes)


def check_place(where: WeightsOn, limit: int | None, devices: Sequence[torch.device]) -> None:
    """Refuse weights where these devices do not take them from; raises KvcliError (usage)."""
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
    """The two places of a model's layers on its device: `rooms` has the bytes of their weights there, by name.

    `layers` has the weights of each layer that passes, with where their bytes begin in its place.
    """

    def __init__(self, streaming: InTurn, sources: Mapping[str, Source], device: torch.device):
        self.streaming, self.sources, self.device = streaming, sources, device
        size = max(streaming.sizes)
        places = room_for([size, size], device)
        self.places = [torch.empty(size, dtype=torch.uint8, device=device) if each is None else each for each in places]
        self.host: list[Tensor] = []  # the layers in a GPU's host memory
        self.rooms: dict[str, Tensor] = {}
        self.layers: list[list[tuple[Source, int]]] = []
        for at, names in enumerate(streaming.names):
            begin = 0
            self.layers.append([])
            for name in names:
                source = sources[name]
                self.rooms[name] = self.places[at % 2][begin : begin + source.nbytes]
                self.layers[at].append((source, begin))
                begin += _size([source.nbytes])

    def attach(self, model: PreTrainedModel) -> None:
        """Let the layers of a model that pass refuse to run, until something brings them."""
        layers = layers_of(model)
        for number in self.streaming.layers:
            layers[number].forward = _absent
        _LAYOUTS[model] = self


_LAYOUTS: WeakKeyDictionary[nn.Module, Layout] = WeakKeyDictionary()


def layout_of(model: PreTrainedModel) -> Layout | None:
    """Return where the layers of a model pass; None if all of its weights are on the device."""
    return _LAYOUTS.get(model)


def _absent(*_: object, **__: object) -> None:
    raise usage_error("only kvcli's own steps bring the weights of --weights-on to the device", "leave it out here")
