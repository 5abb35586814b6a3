"""The method of a run that names none: full attention where reading everything is cheap, retrieval elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcli.capacity.memory import kv_footprint
from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.profiles import Profile, reference_profile
from kvcli.models.loading import Checkpoint

BUDGETS = 4
"""Below so many budgets, choosing tokens takes about as long as reading them all (docs/results.md, Decode step)."""
SHARE = 0.5
"""Below this share of the weights' bytes, reading all of the KV adds at most half to a step."""


def choose(
    retrieval: Profile, checkpoint: Checkpoint, capacities: Sequence[int], samples: int, check: Callable[[], None]
) -> tuple[Profile, str]:
    """Choose a profile for sequences of `capacities` tokens, each continued `samples` times; return it and the reason.

    `check` raises KvcliError (exit code 3) if full attention will not fit.
    """
    full, longest, geometry = reference_profile(), max(capacities), checkpoint.geometry
    budget = getattr(retrieval.settings, "budget", 0)
    instead = f"no --method: using {retrieval.method}"
    kv = sum(_bytes(full, checkpoint, tokens) for tokens in capacities) * samples
    if longest > BUDGETS * budget and kv > SHARE * geometry.weight_bytes:
        return retrieval, f"{instead}, which reads about {budget:,} of {longest:,} tokens per step"
    try:
        check()
    except KvcliError as error:
        if error.exit_code != ExitCode.WILL_NOT_FIT:
            raise
        return retrieval, f"{instead}, because full attention does not fit into memory"
    return full, f"no --method: using full attention, because reading all of {longest:,} tokens is cheap"


def _bytes(profile: Profile, checkpoint: Checkpoint, tokens: int) -> int:
    held = kv_footprint(profile, checkpoint.geometry, tokens, checkpoint.dtype, place=checkpoint.place)
    return held.device + held.host
