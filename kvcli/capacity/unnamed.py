"""Where reading everything is cheap: full attention there if no method is named, and no gain from drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcli.capacity.memory import kv_footprint
from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.profiles import Profile, reference_profile
from kvcli.models.loading import Checkpoint
from kvcli.sizes import Share

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
