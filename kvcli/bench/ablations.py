"""The methods and profiles that a profile compares, and where asked for the same with parts switched off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcli.inputs.profiles import Profile, resolve_profile
from kvcli.inputs.variants import Variant
from kvcli.methods import get_method


@dataclass(frozen=True)
class Entry:
    """One method under one profile; `kind` is "method", or "ablation" where a part of it is switched off."""

    label: str
    kind: str
    profile: Profile


def entries(compared: Sequence[Variant], ablate: bool) -> tuple[Entry, ...]:
    """List what is compared; with `ablate` each method comes after the ablations that it declares."""
    found = []
    for variant in compared:
        profile = variant.profile
        steps = get_method(profile.method).ablation if ablate else {}
        for name, settings in steps.items():
            reduced = resolve_profile(profile.method, None, {**profile.settings.model_dump(), **settings})
            found.append(Entry(f"{variant.name}, {name}", "ablation", reduced))
        found.append(Entry(variant.name, "method", profile))
    return tuple(found)
