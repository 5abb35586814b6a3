"""What a run will need in each tier, by the allocations it will make, and whether it fits, before it makes any.

A method built on the meta device owns tensors of the right shapes and no bytes, so its KV is counted, not estimated.
Where a method learns from the prompt how much it keeps, that is what it holds at most (`Method.planned_is_bound`).
The workspace of the prefill is an estimate of the largest tensors that live at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from kvcli.capacity import cgroup
from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.profiles import Profile, reference_profile
from kvcli.methods import get_method
from kvcli.methods.base import Method, SequenceContext
from kvcli.models.geometry import ModelGeometry
from kvcli.models.loading import Checkpoint
from kvcli.runtime.prefill import CHUNK
from kvcli.runtime.sampling import Sampling
from kvcli.sizes import format_bytes
from kvcli.store.cache import Footprint, Tiers
from kvcli.telemetry.counters import Counters
from kvcli.telemetry.timeline import Timeline

# Bytes that the runtime itself holds beside our tensors (allocator slack, thread stacks, a CUDA context).
RUNTIME_BYTES = 256 << 20


@dataclass(frozen=True)
class Need:
    """Bytes a run takes: `weights`, `kv` of all sequences by tier, `workspace` of the longest prefill."""

    weights: int
    kv: Footprint
    workspace: int

    def on(self, device: torch.device) -> dict[str, int]:
        """Total by pool of memory: on a CPU both tiers are the host's."""
        compute = self.weights + self.kv.device + self.workspace + RUNTIME_BYTES
        if device.type == "cuda":
            return {"device": compute, "host": self.kv.host + RUNTIME_BYTES}
        return {"host": compute + self.kv.host}


def kv_footprint(
    profile: Profile, geometry: ModelGeometry, capacity: int, dtype: torch.dtype, prompt_tokens: int | None = None
) -> Footprint:
    """KV bytes of one sequence of `capacity` tokens, `prompt_tokens` of them its prompt where that is known."""
    return planned_method(profile, geometry, capacity, dtype, prompt_tokens).footprint()


def planned_method(
    profile: Profile, geometry: ModelGeometry, capacity: int, dtype: torch.dtype, prompt_tokens: int | None = None
) -> Method[Any, Any]:
    """Make the method object of a sequence on the meta device; see `kv_footprint`."""
    context = SequenceContext(
        capacity=capacity,
        tiers=Tiers.for_device(torch.device("meta"), dtype),
        counters=Counters(len(geometry.layers)),
        timeline=Timeline(),
        rotary=[None] * len(geometry.layers),
        prompt_tokens=prompt_tokens,
    )
    return get_method(profile.method)(profile.settings, geometry.layers, context)


def need(
    profile: Profile,
    geometry: ModelGeometry,
    dtype: torch.dtype,
    prompts: Sequence[int],
    max_tokens: int,
    samples: int,
    audited: bool = False,
) -> Need:
    """Add up a run over `prompts` (their lengths in tokens), each continued `samples` times by `max_tokens`.

    An audited run holds, beside each sequence, the cache of full attention.
    """
    each = {length: planned_method(profile, geometry, length + max_tokens, dtype, length) for length in set(prompts)}
    kv = sum((each[length].footprint() for length in prompts for _ in range(samples)), Footprint())
    if audited:
        reference = reference_profile()
        beside = {length: kv_footprint(reference, geometry, length + max_tokens, dtype, length) for length in each}
        kv = sum((beside[length] for length in prompts for _ in range(samples)), kv)
    longest = max(prompts)
    return Need(geometry.weight_bytes, kv, _workspace(geometry, longest, each[longest].prefill_window, dtype.itemsize))


def check(
    profile: Profile,
    checkpoint: Checkpoint,
    prompts: Sequence[int],
    sampling: Sampling,
    audited: bool = False,
    way_out: str = "take a smaller --dtype, --max-tokens or --num-samples, or fewer files at once",
) -> None:
    """Refuse a run over prompts of these lengths (in tokens) that will not fit; `way_out` is what the user can change.

    Raises:
        KvcliError: exit code 3, with what is needed, what is free, and the longest context that would fit.
    """

    def planned(longest: int) -> Need:
        lengths = [min(longest, length) for length in prompts]
        return need(
            profile,
            checkpoint.geometry,
            checkpoint.dtype,
            lengths,
            sampling.max_tokens,
            sampling.num_samples,
            audited,
        )

    device, longest = checkpoint.device, max(prompts)
    free, wanted = available(device), planned(longest)
    if fits(wanted.on(device), free):
        return
    pool = next(name for name, size in wanted.on(device).items() if size > free[name])
    fitting = longest_fitting(lambda n: planned(n).on(device), free, longest)
    if fitting:
        least = f"up to {fitting:,} tokens would fit"
    elif wanted.weights + RUNTIME_BYTES > max(free.values()):
        least = "not even the weights fit"
    else:
        least = f"with {sampling.max_tokens:,} tokens of output no context fits"
    raise KvcliError(
        f"a context of {longest:,} tokens needs {format_bytes(wanted.on(device)[pool])} of {pool} memory (weights "
        f"{format_bytes(wanted.weights)}, KV {format_bytes(wanted.kv.device + wanted.kv.host)}), "
        f"{format_bytes(free[pool])} are free",
        f"{least}; or {way_out}" + (", or leave --audit out" if audited else ""),
        ExitCode.WILL_NOT_FIT,
    )


def available(device: torch.device) -> dict[str, int]:
    """Free bytes by pool of memory; a container may grant less than the machine has."""
    machine, group = int(psutil.virtual_memory().available), cgroup.memory_free()
    free = {"host": machine if group is None else min(machine, group)}
    if device.type == "cuda":
        free["device"] = torch.cuda.mem_get_info(device)[0]
    return free


def fits(needed: dict[str, int], free: dict[str, int]) -> bool:
    """Tell whether no pool of memory is overdrawn."""
    return all(needed[pool] <= free[pool] for pool in needed)


def longest_fitting(needed: Callable[[int], dict[str, int]], free: dict[str, int], limit: int) -> int:
    """Find the longest context below `limit`, in tokens, whose needs by pool fit; 0 where none does."""
    return bisect_left(range(1, limit), True, key=lambda n: not fits(needed(n), free))


def _workspace(geometry: ModelGeometry, length: int, window: int | None, itemsize: int) -> int:
    """Hidden states in and out, one layer's KV and its heads' tables at full length; a chunk's intermediates.

    Where the prompt is read by windows through all layers, only the tables are at full length.
    """
    layer = max(geometry.layers, key=lambda layer: layer.num_kv_heads * layer.head_dim)
    per_token = 2 * geometry.hidden_size + 2 * layer.num_kv_heads * layer.head_dim
    per_chunk_token = 3 * geometry.intermediate_size + 4 * layer.num_heads * layer.head_dim
    at_once, chunk = (length, CHUNK) if window is None else (min(length, window), window)
    return itemsize * (length * 2 * layer.head_dim + at_once * per_token + min(length, chunk) * per_chunk_token)
