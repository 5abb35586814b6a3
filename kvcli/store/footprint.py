"""How much memory a cache takes, and how much of it a step moves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import zip_longest

from torch import Tensor


@dataclass(frozen=True)
class Footprint:
    """Bytes a cache holds in each tier; `shared` are bytes in host memory that another sequence holds.

    `disk` are those of its files: what `host` holds of them is a copy. Where there are several devices, `by_device` has
    those of each, in their order.
    """

    device: int = 0
    host: int = 0
    shared: int = 0
    disk: int = 0
    by_device: tuple[int, ...] = ()

    def __add__(self, other: Footprint) -> Footprint:
        return Footprint(
            self.device + other.device,
            self.host + other.host,
            self.shared + other.shared,
            self.disk + other.disk,
            tuple(map(sum, zip_longest(self.by_device, other.by_device, fillvalue=0))),
        )

    def times(self, number: int) -> Footprint:
        """Count it so many times; what is taken away counts less than none."""
        device, host, shared, disk = (number * size for size in (self.device, self.host, self.shared, self.disk))
        return Footprint(device, host, shared, disk, tuple(number * size for size in self.by_device))

    def on(self, place: int, devices: int) -> Footprint:
        """Say that the device is this one of several."""
        return replace(self, by_device=tuple(self.device if place == at else 0 for at in range(devices)))


@dataclass(frozen=True)
class Traffic:
    """Bytes that a decode step has to move in one layer of one sequence.

    Read on the device are the `attended` KV, the `scored` part of the index, and the `scores` that are selected by.
    `recalled` is what comes from the host when none of the selected KV is on the device yet; with it `rebuilt_from` is
    read on the device where keys are made of their factors, in so many `rebuilding` operations (a multiply-add is two).
    """

    attended: int = 0
    scored: int = 0
    scores: int = 0
    recalled: int = 0
    rebuilt_from: int = 0
    rebuilding: int = 0


def nbytes(*tensors: Tensor | None) -> int:
    """Sum the bytes of tensors, of those that are there."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
