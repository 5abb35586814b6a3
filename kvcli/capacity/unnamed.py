"""What serves if no method is named: the model's own selection if it has one, full attention if it fits.

Otherwise retrieval, whose leading layers attend to everything and lie on the device, as many of them as fit there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from kvcli.capacity.memory import kv_footprint
from kvcli.inputs.profiles import Profile, reference_profile, resolve_profile
from kvcli.models.devices import Place
from kvcli.models.geometry import ModelGeometry
from kvcli.sizes import Share

BUDGETS = 4
"""Below so many budgets, choosing tokens takes about as long as reading them all (docs/results.md, Decode step)."""
SHARE = 0.5
"""Below this share of the weights' bytes, reading all of the KV adds at most half to a step."""
Lack = Callable[[Profile], str | None]
"""Says of which memory a run under a profile needs more than is free; None if it fits."""


def native(profile: Profile, geometry: ModelGeometry) -> Profile:
    """Return `profile`, or that of the method `native` if nobody named one and the model selects by itself."""
    return resolve_profile(method="native") if profile.unnamed and geometry.selects is not None else profile


def choose(
    retrieval: Profile, geometry: ModelGeometry, dtype: torch.dtype, place: Place, capacities: Sequence[int], lack: Lack
) -> Profile:
    """Choose for sequences of `capacities` tokens; the profile's `chosen` is a line that names it and says why.

    If nothing fits, full attention is chosen on a CPU, whose memory is the host's, and `offload` elsewhere.
    """
    if geometry.selects is not None:
        own = native(retrieval, geometry)
        return _chosen(own, f"using {own.method}, because this model's layers select by themselves")
    longest, full = max(capacities), reference_profile()
    lacking = lack(full)
    if lacking is None or place.type == "cpu":
        if is_cheap(retrieval, geometry, dtype, place, capacities):
            why = f"reading all of {longest:,} tokens is cheap"
        else:
            fits = "its KV fits into memory" if lacking is None else "KV kept elsewhere saves no memory on a CPU"
            faster = f"--method {retrieval.method} reads about {_budget(retrieval, longest):,}"
            why = f"{fits}; a step reads all of {longest:,} tokens, {faster}"
        return _chosen(full, f"using full attention, because {why}")
    because = f"because with full attention {lacking}"
    layers = len(geometry.layers)
    for resident in reversed(range(layers)):
        found = resolve_profile(retrieval.method, overrides={"dense_layers": resident})
        if lack(found) is None:
            reads = f"reads about {_budget(found, longest):,} of {longest:,} tokens per step in {layers - resident} of "
            approximation = f"an approximation that {reads}{layers} layers"
            return _chosen(found, f"using {found.method}, {approximation}, {because}; --method offload is exact")
    exact = resolve_profile(method="offload")
    if (still := lack(exact)) is not None:
        return _chosen(exact, f"nothing fits; even with offload {still}")
    return _chosen(exact, f"using offload, which brings all KV to the device in every step, {because}")


def is_cheap(
    retrieval: Profile, geometry: ModelGeometry, dtype: torch.dtype, place: Place, capacities: Sequence[int]
) -> bool:
    """Tell whether reading everything takes about as long as choosing, or as the weights."""
    full, longest = reference_profile(), max(capacities)
    held = (kv_footprint(full, geometry, tokens, dtype, place=place) for tokens in capacities)
    kv = sum(each.device + each.host for each in held)
    return longest <= BUDGETS * _budget(retrieval, longest) or kv <= SHARE * geometry.weight_bytes


def _chosen(profile: Profile, line: str) -> Profile:
    return replace(profile, chosen=f"no --method: {line}")


def _budget(retrieval: Profile, longest: int) -> int:
    """Return the budget for a sequence of `longest` tokens; 0 if there is none."""
    budget: int = getattr(retrieval.settings, "budget", 0)
    return budget.of(longest) if isinstance(budget, Share) else budget
