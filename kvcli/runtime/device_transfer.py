"""Run a model whose layers lie on several devices: move each part's inputs to its device first."""

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
    """A tensor, or its stand-in, that can be moved to another device."""

    def to(self, device: torch.device) -> Any:
        """Return it on that device."""


class Carrier(Protocol):
    """Moves work between devices while it is captured: see `kvcli.runtime.gpu.recorder`."""

    def go_to(self, device: torch.device) -> torch.device:
        """Make this device the one of the following work; return the device before."""

    def bring(self, given: Tensor, device: torch.device) -> Tensor:
        """Go to this device, and return a tensor there with the numbers of `given`, updated on every later run."""


class DeviceTransfer:
    """Moves the inputs of the separately placed parts of one model, and makes their device the current one.

    Hidden states cross when a layer lies on another device than the one before; inputs of all layers (positions, rotary
    angles) cross once per run and device. While a run is captured a `carrier` does that.
    """

    def __init__(self, placement: Placement):
        self.first = placement.first
        self.devices = placement.devices
        self.carrier: Carrier | None = None
        self._shared: dict[tuple[int, torch.device], tuple[Any, Any]] = {}  # with the source, which keeps its id valid

    @contextmanager
    def running(self) -> Iterator[None]:
        """Surround a run of the model; one may come between the chunks of another."""
        before, self._shared = self._shared, {}
        try:
            with current(self.first):
                yield
        finally:
            self._shared = before

    @contextmanager
    def carried(self, carrier: Carrier) -> Iterator[None]:
        """Use `carrier` for everything that crosses within this context."""
        self.carrier = carrier
        try:
            yield
        finally:
            self.carrier = None

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Run on this device within this context."""
        carrier, before = self.carrier, device
        with current(device):
            if carrier is not None:
                before = carrier.go_to(device)
            yield
        if carrier is not None:
            carrier.go_to(before)

    def there(self, given: Moves, device: torch.device) -> Any:
        """Return `given` on this device, where the run works from now on."""
        if self.carrier is None:
            return given.to(device)
        assert isinstance(given, Tensor), "what crosses in a captured step is a tensor"
        return self.carrier.bring(given, device)

    def bring(
        self, device: torch.device, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Move the inputs of a part to its device: the hook before its forward pass."""
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
    """Move inputs to the parts of a model within this context; yields None if all parts lie on one device."""
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
    """Launch kernels on this device within this context."""
    with torch.cuda.device(device if device.type == "cuda" else -1):  # -1: none
        yield


def _each(given: Any, move: Callable[[Moves], Any]) -> Any:
    """Move the tensors of an argument, which may be a tuple, a list or a dictionary of some."""
    if isinstance(given, tuple | list):
        return type(given)(_each(item, move) for item in given)
    if isinstance(given, dict):
        return {name: _each(item, move) for name, item in given.items()}
    return move(given) if isinstance(given, Tensor | Moves) else given
