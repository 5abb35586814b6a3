"""The tier below host memory for a run, or for a plan of one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcli.capacity.memory import available
from kvcli.errors import usage_error
from kvcli.inputs.options import DiskOptions
from kvcli.inputs.profiles import Profile
from kvcli.memory.disk_tier import DiskTier


def disk_for(
    asked: DiskOptions | None, profiles: Sequence[Profile], device: torch.device, sequences: int
) -> DiskTier | None:
    """Make the tier for `sequences` of those profiles that use it; None if none was requested.

    Raises:
        KvcliError: none of the methods keeps KV on a disk, or the directory takes no files (usage).
    """
    if asked is None:
        return None
    using = next((profile for profile in profiles if profile.settings.on_host), profiles[0])
    return disk_tier(asked, using, device, sequences)


def disk_tier(
    asked: DiskOptions, profile: Profile, device: torch.device, sequences: int, free: int | None = None
) -> DiskTier:
    """Make the tier for `sequences`; by default its cache is half of the `free` host memory.

    Raises:
        KvcliError: the method keeps no KV on a disk, or the directory takes no files (usage).
    """
    if not profile.settings.on_host:
        what = f"--kv-disk: method {profile.method!r} keeps no KV on a disk with these settings"
        raise usage_error(what, "use a method that does, such as freekv or offload, or leave --kv-disk out")
    if free is None:
        free = available(device)["host"]
    tier = DiskTier(asked.folder, free // 2 if asked.host_memory is None else asked.host_memory, sequences)
    tier.check(0)
    return tier
