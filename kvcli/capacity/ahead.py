"""Prepare the pinned memory that a sequence will request while its model is loaded."""

from __future__ import annotations

from concurrent.futures import Future

import torch
from torch import Tensor

from kvcli.capacity.memory import planned_method
from kvcli.inputs.profiles import Profile
from kvcli.memory.pinned import Wanted, pinned_allocator
from kvcli.models.geometry import ModelGeometry
from kvcli.models.loading import Checkpoint


def prepare_host_memory(profile: Profile, checkpoint: Checkpoint, prompt_tokens: int, max_tokens: int) -> None:
    """Prepare a sequence's host memory for a GPU; `forget_host_memory` releases what nothing has requested."""
    if checkpoint.device.type == "cuda" and checkpoint.placement is None:  # each of several devices has its own
        wanted = host_tensors(profile, checkpoint.geometry, checkpoint.dtype, prompt_tokens, max_tokens)
        pinned_allocator(checkpoint.device).prepare(wanted)


def forget_host_memory(device: torch.device) -> None:
    """Release prepared memory that no sequence has requested."""
    if device.type == "cuda":
        pinned_allocator(device).forget()


def host_tensors(
    profile: Profile, geometry: ModelGeometry, dtype: torch.dtype, prompt_tokens: int, max_tokens: int
) -> list[Wanted]:
    """List the host memory that a sequence on a GPU requests, in order.

    Raises:
        KvcliError: as for `planned_method`.
    """
    notes = _Notes()
    planned_method(profile, geometry, prompt_tokens + max_tokens, dtype, prompt_tokens, pinned=notes)
    return notes.wanted


class _Notes:
    """A stand-in for the allocator of pinned memory on the meta device, which records the requests."""

    def __init__(self) -> None:
        self.wanted: list[Wanted] = []

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, urgent: bool = False) -> Future[Tensor]:
        """Return a tensor without bytes; urgent memory is for the prompt's reading, not for the sequence."""
        if not urgent:
            self.wanted.append((shape, dtype))
        ready: Future[Tensor] = Future()
        ready.set_result(torch.empty(shape, dtype=dtype, device="meta"))
        return ready
