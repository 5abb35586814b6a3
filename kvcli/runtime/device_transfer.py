"""A model whose layers lie on several devices: what a part of it is given comes to the part's device first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvcli.models.devices import Placement


@runtime_checkable
class Moves(Protocol):
    """What can be had on another device: a tensor, or what stands for one."""

    def to(self, device: torch.device) -> Any:
        """Give it there."""


class Carrier(Protocol):
    """Takes work from device to device while it is captured: see `kvcli.runtime.gpu.recorder`."""

    def go_to(self, device: torch.device) -> torch.device:
        """Have what follows be work of this device; returns where it was before."""

    def bring(self, given: Tensor, device: torch.device) -> Tensor:
        """Go to this device, and give a tensor there with the numbers of `given`: those of later runs in their turn."""


class DeviceTransfer:
    """Moves the inputs of the parts of one model that are placed apart, and makes their device the current one.

    Hidden states cross where a layer lies on another device than the one before; what all layers are given (positions,
    rotary angles) crosses once a run for each device. While a run is captured a `carrier` does that.
    """

    def __init__(self, placement: Placement):
        self.first = placement.first
        self.devices = placement.devices
        self.carrier: Carrier | None = None
        self._shared: dict[tuple[int, torch.device], tuple[Any, Any]] = {}  # the source lives as long as its id counts

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within, a run of the model; one may come between the chunks of another."""
        before, self._shared = self._shared, {}
        try:
            with current(self.first):
                yield
        finally:
            self._shared = before

    @contextmanager
    def carried(self, carrier: Carrier) -> Iterator[None]:
        """Within, what crosses goes by it."""
        self.carrier = carrier
        try:
            yield
        finally:
            self.carrier = None

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Within, a run works on this device."""
        carrier, before = self.carrier, device
        with current(device):
            if carrier is not None:
                before = carrier.go_to(device)
            yield
        if carrier is not None:
            carrier.go_to(before)

    def there(self, given: Moves, device: torch.device) -> Any:
        """Give something on this device, where the run works from now on."""
        if self.carrier is None:
            return given.to(device)
        assert isinstance(given, Tensor), "what crosses in a captured step is a tensor"
        return self.carrier.bring(given, device)

    def bring(
        self, device: torch.device, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Have the inputs of a part on its device: the hook before its forward pass."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if self.carrier is not None:
            self.carrier.go_to(device)
        shared = partial(self._once, device)
        own = partial(self.there, device=device)
        named = {name: _each(given, own if name == "hidden_states" else shared) for name, given in kwargs.items()}
        return tuple(_each(given, own) for given in args), named

    def _once(self, device: torch.device, given: Moves) -> Any:
        key = id(given), device
        if key not in self._shared:
            self._shared[key] = given, self.there(given, device)
        return self._shared[key][1]


@contextmanager
def on_its_devices(model: PreTrainedModel, placement: Placement | None) -> Iterator[DeviceTransfer | None]:
    """Inside, the parts of a model are given what they need where they lie; None where all lie on one device."""
    if placement is None:
        yield None
        return
    moved = DeviceTransfer(placement)
    parts = ((model.get_submodule(name), device) for name, device in placement.modules.items())
    handles = [
        part.register_forward_pre_hook(partial(moved.bring, device), with_kwargs=True, prepend=True)
        for part, device in parts
    ]
    try:
        yield moved
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def current(device: torch.device) -> Iterator[None]:
    """Within, kernels are launched on this device."""
    with torch.cuda.device(device if device.type == "cuda" else -1):  # -1: none
        yield


def _each(given: Any, move: Callable[[Moves], Any]) -> Any:
    """Move the tensors of an argument, which may be a tuple, a list or a dictionary of some."""
    if isinstance(given, tuple | list):
        return type(given)(_each(item, move) for item in given)
    if isinstance(given, dict):
        return {name: _each(item, move) for name, item in given.items()}
    return move(given) if isinstance(given, Tensor | Moves) else given
