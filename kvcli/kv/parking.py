"""Parking: device tensors of a layer wait in host memory while other layers are read."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvcli.memory.tiers import Tiers


class Waits(Protocol):
    """A cache, or other state of a method on the device."""

    def waiting(self) -> Sequence[Tensor]:
        """Return tensors, each with all of its storage, that nobody uses between `load` and the first step.

        Before the prompt comes their values have no meaning.
        """


class Parking:
    """Keeps the tensors of each `Waits` on the device only while it is open, until all `leave`.

    All calls for one of them must come in one stream.
    """

    def __init__(self, tiers: Tiers):
        self.tiers = tiers
        self._parked: dict[int, _Parked] = {}

    def enter(self, what: Waits, keeps: bool = True) -> None:
        """Park something that was just made; without `keeps` its contents are not stored, and need no host memory."""
        tensors = [tensor for tensor in what.waiting() if tensor.numel()]
        hosts = [self.tiers.on_host_async(*x.shape, dtype=x.dtype) if keeps else None for x in tensors]
        self._parked[id(what)] = _Parked(what, list(zip(tensors, hosts, strict=True)))
        for tensor in tensors:
            tensor.untyped_storage().resize_(0)

    def open(self, what: Waits) -> None:
        """Bring its tensors to the device."""
        parked = self._parked.get(id(what))
        if parked is None or parked.open:
            return
        parked.open = True
        for tensor, host in parked.tensors:
            tensor.untyped_storage().resize_(tensor.nbytes)
            if parked.filled and host is not None:
                tensor.copy_(host.result(), non_blocking=True)

    def close(self, what: Waits) -> None:
        """Move its tensors to host memory.

        Raises:
            KvcliError: host memory cannot be pinned (will not fit).
        """
        parked = self._parked.get(id(what))
        if parked is None or not parked.open:
            return
        parked.open, parked.filled = False, True
        for tensor, host in parked.tensors:
            assert host is not None, "nothing was to be kept"
            host.result().copy_(tensor, non_blocking=True)
            if tensor.is_cuda:  # its memory must not be reused before the copy is done
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
            tensor.untyped_storage().resize_(0)

    def leave(self) -> None:
        """Bring everything to the device and keep it there."""
        for parked in list(self._parked.values()):
            self.open(parked.what)
        self._parked.clear()


@dataclass
class _Parked:
    what: Waits
    tensors: list[tuple[Tensor, Future[Tensor] | None]]  # each with the memory that it waits in
    open: bool = False
    filled: bool = False  # whether that memory has been written
