"""What serves if no method is named: the model's own selection if it has one, full attention if it fits.

Otherwise retrieval, whose leading layers attend to everything and lie on the device, as many of them as fit there. KV
is in the form that is asked for. Full attention has some forms, on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import get_args

import torch

from kvcli.capacity.memory import kv_footprint
from kvcli.inputs.profiles import Profile, reference_profile, resolve_profile
from kvcli.kernels.narrow_attention import NarrowDtype
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
    """Return `profile`, or that of the method `native` if nobody named one and the model selects by itself.

    Raises:
        KvcliError: such a model is to keep KV in a narrow form (usage).
    """
    if not profile.unnamed or geometry.selects is None:
        return profile
    return resolve_profile(method="native", overrides=_form(profile))


def choose(
    retrieval: Profile, geometry: ModelGeometry, dtype: torch.dtype, place: Place, capacities: Sequence[int], lack: Lack
) -> Profile:
    """Choose for sequences of `capacities` tokens; the profile's `chosen` is a line that names it and says why.

    If nothing fits, full attention is chosen on a CPU, whose memory is the host's, and `offload` elsewhere.
    """
    if geometry.selects is not None:
        own = native(retrieval, geometry)
        return _chosen(own, f"using {own.method}, because this model's layers select by themselves")
    longest, form = max(capacities), _form(retrieval)
    full, on_cpu = _full(form, place), place.type == "cpu"
    lacking = None if full is None else lack(full)
    if full is not None and (lacking is None or on_cpu):
        if is_cheap(retrieval, geometry, dtype, place, capacities):
            why = f"reading all of {longest:,} tokens is cheap"
        else:
            fits = "its KV fits into memory" if lacking is None else "KV kept elsewhere saves no memory on a CPU"
            faster = f"--method {retrieval.method} reads about {_budget(retrieval, longest):,}"
            why = f"{fits}; a step reads all of {longest:,} tokens, {faster}"
        return _chosen(full, f"using full attention, because {why}")
    if full is None:
        because = f"because full attention does not keep KV as {form['kv_dtype']}{'' if on_cpu else ' on a GPU'}"
    else:
        because = f"because with full attention {lacking}"
    if on_cpu:
        return _approximation(retrieval, geometry, longest, because)
    for resident in reversed(range(len(geometry.layers))):
        found = resolve_profile(retrieval.method, overrides={"dense_layers": resident, **form})
        if lack(found) is None:
            return _approximation(found, geometry, longest, because)
    exact = resolve_profile(method="offload", overrides=form)
    if (still := lack(exact)) is not None:
        return _chosen(exact, f"nothing fits; even with offload {still}")
    return _chosen(exact, f"using offload, which brings all KV to the device in every step, {because}")


def is_cheap(
    retrieval: Profile, geometry: ModelGeometry, dtype: torch.dtype, place: Place, capacities: Sequence[int]
) -> bool:
    """Tell whether reading everything takes about as long as choosing, or as the weights."""
    full, longest = _full(_form(retrieval), place) or reference_profile(), max(capacities)
    held = (kv_footprint(full, geometry, tokens, dtype, place=place) for tokens in capacities)
    kv = sum(each.device + each.host for each in held)
    return longest <= BUDGETS * _budget(retrieval, longest) or kv <= SHARE * geometry.weight_bytes


def _form(profile: Profile) -> dict[str, str]:
    """Return the setting of the form in which KV is kept, if it is not as computed."""
    held = getattr(profile.settings, "kv_dtype", "auto")
    return {} if held == "auto" else {"kv_dtype": held}


def _full(form: dict[str, str], place: Place) -> Profile | None:
    """Return full attention with KV in a form; None if it does not have the form."""
    if form and (place.type != "cpu" or form["kv_dtype"] not in get_args(NarrowDtype)):
        return None
    return resolve_profile(method="full", overrides=form)


def _approximation(profile: Profile, geometry: ModelGeometry, longest: int, because: str) -> Profile:
    layers = len(geometry.layers)
    where = f"in {layers - getattr(profile.settings, 'dense_layers', 0)} of {layers} layers"
    reads = f"reads about {_budget(profile, longest):,} of {longest:,} tokens per step {where}"
    exact = "--method offload is exact"
    return _chosen(profile, f"using {profile.method}, an approximation that {reads}, {because}; {exact}")


def _chosen(profile: Profile, line: str) -> Profile:
    return replace(profile, chosen=f"no --method: {line}")


def _budget(retrieval: Profile, longest: int) -> int:
    """Return the budget for a sequence of `longest` tokens; 0 if there is none."""
    budget: int = getattr(retrieval.settings, "budget", 0)
    return budget.of(longest) if isinstance(budget, Share) else budget
