"""Resolve device names, and place a model's layers on devices."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import psutil
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvcli.errors import ExitCode, KvcliError, usage_error
from kvcli.models.auto import layers_of
from kvcli.models.geometry import ModelGeometry, build_on_meta
from kvcli.sizes import format_bytes


def resolve_device(name: str) -> torch.device:
    """Choose the device: auto takes the current CUDA device, if any; raises KvcliError (usage) if it is absent."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if count else "cpu"
    kind, _, number = name.partition(":")
    if name == "cpu":
        return torch.device("cpu")
    if kind != "cuda" or (":" in name and not number.isdecimal()):
        raise KvcliError(f"unknown device {name!r}", "use auto, cpu, cuda or cuda:N", ExitCode.USAGE)
    if not count:
        raise KvcliError(
            f"device {name!r} asked for, but torch sees no CUDA device", "use --device cpu", ExitCode.USAGE
        )
    index = int(number) if number else torch.cuda.current_device()
    if index >= count:
        known = ", ".join(f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(count))
        raise KvcliError(f"there is no device {name!r}", f"there is {known}", ExitCode.USAGE)
    return torch.device("cuda", index)


def resolve_devices(names: str) -> tuple[torch.device, ...]:
    """Choose the devices of a comma-separated list: several GPUs, or pieces of one CPU, on which layers are tried out.

    Raises:
        KvcliError: there is no such device, or they cannot work together (usage).
    """
    found = tuple(map(resolve_device, names.split(",")))
    if len(found) == 1:
        return found
    if len({device.type for device in found}) > 1:
        raise usage_error(f"--device {names}: layers on a GPU and on the CPU do not run together", "name GPUs alone")
    wrong = "auto" if "auto" in names else next((str(each) for each in found[1:] if found.count(each) > 1), None)
    if wrong is not None and found[0].type == "cuda":
        raise usage_error(f"--device {names} names {wrong} among others", "name each GPU once, as in cuda:0,cuda:1")
    return found


def another_machine(names: str) -> tuple[torch.device, ...]:
    """Return the GPUs of another machine, one or as many as are named; empty if they are on no other machine."""
    if names in ("auto", "cuda"):
        return (torch.device("cuda"),)
    return tuple(map(torch.device, names.split(","))) if "," in names and "cpu" not in names else ()


def placed(
    names: str,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    geometry: ModelGeometry,
    devices: Sequence[torch.device],
    free: Sequence[int] | None = None,
) -> Placement | None:
    """Place the layers of a model on the named devices; None if all lie on one.

    "auto" takes all GPUs if the current one does not hold the weights. `free` gives the free bytes of each device, by
    default those of this machine.

    Raises:
        KvcliError: quantised weights, which lie on one device (usage); the weights do not fit (will not fit).
    """
    if names == "auto" and free is None and devices[0].type == "cuda" and geometry.form is None:
        others = (torch.device("cuda", at) for at in range(torch.cuda.device_count()))
        if geometry.weight_bytes > free_memory(devices)[0]:
            devices = [devices[0], *(each for each in others if each != devices[0])]
    if len(devices) == 1:
        return None
    if geometry.form is not None:
        raise usage_error(f"weights in {geometry.form.label} need one device, but --device names several", "name one")
    return place(build_on_meta(config, dtype), geometry, devices, free or free_memory(devices))


# The device of each part of a model on several devices: whole decoder layers, in order.

_TRIED = 64
"""The room for caches is found to one part in this many."""


@dataclass(frozen=True)
class Piece:
    """A device with the decoder layers from `first` to `last` and the bytes of all weights that lie there."""

    device: torch.device
    first: int
    last: int
    weights: int

    @property
    def label(self) -> str:
        """Name the device and its layers: "cuda:0 has 0-15"."""
        layers = "none" if self.last < self.first else f"{self.first}-{self.last}"
        return f"{self.device} has {layers if self.last != self.first else self.first}"


@dataclass(frozen=True)
class Placement:
    """The devices of the parts of a model.

    `modules` has the device of the embeddings, of each decoder layer, and of what follows them, by name; `layers` that
    of the decoder layers, `attending` of those that attend, `keeping` of those that keep a state. Several pieces may
    lie on one device.
    """

    modules: Mapping[str, torch.device]
    pieces: tuple[Piece, ...]
    attending: tuple[torch.device, ...]
    keeping: tuple[torch.device, ...]

    def __str__(self) -> str:
        return ", ".join(str(piece.device) for piece in self.pieces)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Each device once, the first one with the embeddings."""
        return tuple(dict.fromkeys(piece.device for piece in self.pieces))

    @property
    def first(self) -> torch.device:
        """The device where tokens go in, and logits come out."""
        return self.pieces[0].device

    @property
    def type(self) -> str:
        """The kind of all devices: cuda or cpu."""
        return self.first.type

    @property
    def layers(self) -> tuple[torch.device, ...]:
        """The device of each decoder layer."""
        return tuple(piece.device for piece in self.pieces for _ in range(piece.first, piece.last + 1))

    def weights(self, device: torch.device) -> int:
        """Return the bytes of the weights on a device."""
        return sum(piece.weights for piece in self.pieces if piece.device == device)

    def as_dict(self) -> list[dict[str, Any]]:
        """Return the placement's part of a report."""
        return [
            {"device": str(piece.device), "layers": [piece.first, piece.last], "weight_bytes": piece.weights}
            for piece in self.pieces
        ]


Place: TypeAlias = torch.device | Placement
"""One device, or several with the layers of each."""


def first_of(place: Place) -> torch.device:
    """Return the device where tokens go in."""
    return place.first if isinstance(place, Placement) else place


def all_of(place: Place) -> tuple[torch.device, ...]:
    """Return each device once."""
    return place.devices if isinstance(place, Placement) else (place,)


def placement_of(place: Place) -> Placement | None:
    """Return the placement of the layers, if not all lie on one device."""
    return place if isinstance(place, Placement) else None


def free_memory(devices: Sequence[torch.device]) -> list[int]:
    """Return the free bytes of each device; pieces on the CPU share the host's equally."""
    host = psutil.virtual_memory().available // len(devices)
    return [torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host for device in devices]


def place(
    model: PreTrainedModel, geometry: ModelGeometry, devices: Sequence[torch.device], free: Sequence[int]
) -> Placement:
    """Place a model, which is on the meta device, on devices with `free` bytes each.

    Raises:
        KvcliError: they do not hold the weights (will not fit); there are fewer layers than devices, or layers read the
            KV of others (usage).
    """
    if len(devices) > geometry.depth:
        what = f"{len(devices)} devices are named for {geometry.depth} layers"
        raise KvcliError(what, f"name at most {geometry.depth}: a layer is not split", ExitCode.USAGE)
    if geometry.shares:
        what = "layers of this model read the KV of others, which lies on one device"
        raise KvcliError(what, "name a single device", ExitCode.USAGE)
    attending = iter(geometry.layers)
    of_layers = [[next(attending) for _ in layer.attention] for layer in geometry.decoder]
    sizes = [sum(each.grows for each in layers) for layers in of_layers]
    sizes = sizes if any(sizes) else [1] * geometry.depth  # caches do not grow with the prompt
    most = sum(free) // sum(sizes)
    least, beyond, found = 0, most + 1, _mapped(model, [0] * geometry.depth, free)
    while found is not None and beyond - least > max(1, most // _TRIED):
        room = (least + beyond) // 2
        tried = _mapped(model, [room * size for size in sizes], free)
        least, beyond, found = (least, room, found) if tried is None else (room, beyond, tried)
    if found is None:
        held = ", ".join(f"{device} {format_bytes(size)}" for device, size in zip(devices, free, strict=True))
        what = f"the weights take {format_bytes(geometry.weight_bytes)}, and whole layers do not fit: {held} free"
        raise KvcliError(what, "name more devices, or use a smaller --dtype", ExitCode.WILL_NOT_FIT)
    return _placement(model, geometry, devices, found)


def _mapped(model: PreTrainedModel, rooms: Sequence[int], free: Sequence[int]) -> dict[str, int] | None:
    """Map the parts of a model to device numbers, with the bytes `rooms` for each layer in addition to its weights.

    Returns None if they do not fit.
    """
    from accelerate import infer_auto_device_map

    layers: Any = layers_of(model)
    log = logging.getLogger("accelerate.utils.modeling")  # warns of devices that this machine lacks
    before, log.level = log.level, logging.ERROR
    for layer, room in zip(layers, rooms, strict=True):  # buffers count like weights
        layer.register_buffer("kvcli_room", torch.empty(room, dtype=torch.uint8, device="meta"), persistent=False)
    try:
        # Number 0 holds nothing: accelerate keeps room for the largest layer free on its first device.
        memory: dict[int | str, int | str] = {0: 0, **dict(enumerate(free, 1))}
        kinds = sorted({type(layer).__name__ for layer in layers})
        found = infer_auto_device_map(model, memory, kinds, clean_result=False, offload_buffers=True)
    finally:
        log.level = before
        for layer in layers:
            del layer.kvcli_room
    numbers = {name: _looked_up(found, name) for name in parts_of(model)}
    return None if "disk" in numbers.values() else {name: int(number) - 1 for name, number in numbers.items()}


def _looked_up(found: Mapping[str, Any], name: str) -> Any:
    """Find a part of a model in a map that may name an enclosing module."""
    while name not in found:
        name = name.rpartition(".")[0]
    return found[name]


def parts_of(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Name the parts that are placed as one, in a model's order: decoder layers, and other modules with weights."""
    layers = list(layers_of(model))
    inside = {module for layer in layers for module in layer.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if module in layers or (module not in inside and any(True for _ in module.parameters(recurse=False)))
    }


def _placement(
    model: PreTrainedModel, geometry: ModelGeometry, devices: Sequence[torch.device], found: Mapping[str, int]
) -> Placement:
    parts = parts_of(model)
    names = {module: name for name, module in parts.items()}
    layers = [found[names[layer]] for layer in layers_of(model)]
    weights, seen = Counter[int](), set[nn.Parameter]()
    for name, module in parts.items():
        for weight in module.parameters():
            if weight not in seen:  # embeddings may also be the head
                weights[found[name]] += weight.nbytes
                seen.add(weight)
    begun = [sum(layer < number for layer in layers) for number in range(len(devices) + 1)]
    spans = zip(devices, begun, begun[1:], strict=False)
    return Placement(
        modules={name: devices[number] for name, number in found.items()},
        pieces=tuple(Piece(device, first, stop - 1, weights[at]) for at, (device, first, stop) in enumerate(spans)),
        attending=tuple(devices[at] for at, each in zip(layers, geometry.decoder, strict=True) for _ in each.attention),
        keeping=tuple(devices[at] for at, layer in zip(layers, geometry.decoder, strict=True) if layer.state),
    )


def device_map(place: Place) -> dict[str, torch.device]:
    """Return transformers' device map; modules outside the placed parts have no weights."""
    if isinstance(place, Placement) and len(place.devices) > 1:
        return {**place.modules, "": place.first}
    return {"": first_of(place)}


def take_hooks_out(module: PreTrainedModel) -> None:
    """Remove the hooks that accelerate adds to modules; `kvcli.runtime.device_transfer` moves their inputs."""
    from accelerate.hooks import remove_hook_from_module

    if any(hasattr(each, "_hf_hook") for each in module.modules()):
        remove_hook_from_module(module, recurse=True)
        for each in module.modules():
            vars(each).pop("forward", None)  # back to the method of the class
