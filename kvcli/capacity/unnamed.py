"""What serves if no method is named: the model's own selection if it has one, full attention if that is cheap."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcli.capacity.memory import kv_footprint
from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.profiles import Profile, reference_profile, resolve_profile
from kvcli.models.geometry import ModelGeometry
from kvcli.models.loading import Checkpoint
from kvcli.sizes import Share

BUDGETS = 4
"""Below so many budgets, choosing tokens takes about as long as reading them all (docs/results.md, Decode step)."""
SHARE = 0.5
"""Below this share of the weights' bytes, reading all of the KV adds at most half to a step."""


def native(profile: Profile, geometry: ModelGeometry) -> Profile:
    """Return `profile`, or that of the method `native` if nobody named one and the model selects by itself."""
    return resolve_profile(method="native") if profile.unnamed and geometry.selects is not None else profile


def choose(
    retrieval: Profile, checkpoint: Checkpoint, capacities: Sequence[int], samples: int, check: Callable[[], None]
) -> tuple[Profile, str]:
    """Choose a profile for sequences of `capacities` tokens, each continued `samples` times; return it and the reason.

    `check` raises KvcliError (exit code 3) if full attention will not fit.
    """
    if checkpoint.geometry.selects is not None:
        own = native(retrieval, checkpoint.geometry)
        return own, f"no --method: using {own.method}, because this model's layers select by themselves"
    longest, instead = max(capacities), f"no --method: using {retrieval.method}"
    if not is_cheap(retrieval, checkpoint, capacities, samples):
        return retrieval, f"{instead}, which reads about {_budget(retrieval, longest):,} of {longest:,} tokens per step"
    try:
        check()
    except KvcliError as error:
        if error.exit_code != ExitCode.WILL_NOT_FIT:
            raise
        return retrieval, f"{instead}, because full attention does not fit into memory"
    return reference_profile(), f"no --method: using full attention, because reading all of {longest:,} tokens is cheap"


def is_cheap(retrieval: Profile, checkpoint: Checkpoint, capacities: Sequence[int], samples: int) -> bool:
    """Tell whether reading everything takes about as long as choosing, or as the weights."""
    kv = sum(_bytes(reference_profile(), checkpoint, tokens) for tokens in capacities) * samples
    longest = max(capacities)
    return longest <= BUDGETS * _budget(retrieval, longest) or kv <= SHARE * checkpoint.geometry.weight_bytes


def _budget(retrieval: Profile, longest: int) -> int:
    """Return the budget for a sequence of `longest` tokens; 0 if there is none."""
    budget: int = getattr(retrieval.settings, "budget", 0)
    return budget.of(longest) if isinstance(budget, Share) else budget


def _bytes(profile: Profile, checkpoint: Checkpoint, tokens: int) -> int:
    held = kv_footprint(profile, checkpoint.geometry, tokens, checkpoint.dtype, place=checkpoint.place)
    return held.device + held.host
