"""The pinned memory that a sequence will ask for, known before its model is loaded: it gets ready meanwhile."""

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
    """Have a sequence's host memory get ready beside a GPU; what is not asked for, `forget_host_memory` lets go of."""
    if checkpoint.device.type == "cuda" and checkpoint.placement is None:  # each of several devices has its own
        wanted = host_tensors(profile, checkpoint.geometry, checkpoint.dtype, prompt_tokens, max_tokens)
        pinned_allocator(checkpoint.device).prepare(wanted)


def forget_host_memory(device: torch.device) -> None:
    """Let go of what was prepared and no sequence has asked for."""
    if device.type == "cuda":
        pinned_allocator(device).forget()


def host_tensors(
    profile: Profile, geometry: ModelGeometry, dtype: torch.dtype, prompt_tokens: int, max_tokens: int
) -> list[Wanted]:
    """List what a sequence beside a GPU asks for in host memory, in order.

    Raises:
        KvcliError: as `planned_method` does.
    """
    notes = _Notes()
    planned_method(profile, geometry, prompt_tokens + max_tokens, dtype, prompt_tokens, pinned=notes)
    return notes.wanted


class _Notes:
    """Stands for an allocator of pinned memory on the meta device, and takes notes of what is asked for."""

    def __init__(self) -> None:
        self.wanted: list[Wanted] = []

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, urgent: bool = False) -> Future[Tensor]:
        """Give a tensor without bytes; what is urgent is for the prompt's reading, not for the sequence."""
        if not urgent:
            self.wanted.append((shape, dtype))
        ready: Future[Tensor] = Future()
        ready.set_result(torch.empty(shape, dtype=dtype, device="meta"))
        return ready
