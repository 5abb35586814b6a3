"""Which devices a name means, and which of them a model takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig

from kvcli.errors import ExitCode, KvcliError, usage_error
from kvcli.models.geometry import ModelGeometry, build_on_meta
from kvcli.models.placement import Placement, free_memory, place


def resolve_device(name: str) -> torch.device:
    """Choose the device: auto takes the current CUDA device where there is one; raises KvcliError (usage) if absent."""
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
    """Choose the devices of a list with commas: several GPUs, or pieces of one CPU, on which layers are tried out.

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
    """The GPUs of another machine, one or as many as are named; none where they are no other machine's."""
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
    """Place the layers of a model on the devices that were named; None where all lie on one.

    "auto" takes all GPUs where the current one does not hold the weights. `free` bytes are what each device has, by
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
        raise usage_error(f"weights in {geometry.form.label} lie on one device, --device names several", "name one")
    return place(build_on_meta(config, dtype), geometry, devices, free or free_memory(devices))
