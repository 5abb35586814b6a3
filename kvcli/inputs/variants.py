"""What is compared: methods and profiles, each with every budget that is asked for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from kvcli.errors import usage_error
from kvcli.inputs.profiles import Profile, known_settings, resolve_profile


@dataclass(frozen=True)
class Variant:
    """One row of the table: a method or a profile, at one budget where it has such a setting."""

    name: str
    budget: int | None
    profile: Profile

    @property
    def label(self) -> str:
        """A name that no other variant of the run has."""
        return self.name if self.budget is None else f"{self.name} {self.budget}"

    def as_dict(self) -> dict[str, Any]:
        """Plain data for the JSON report; a budget that is a share is text, such as "20%"."""
        profile = self.profile.as_dict()
        return {"label": self.label, "name": self.name, "budget": profile["settings"].get("budget"), **profile}


def ablated(variant: Variant) -> list[Variant]:
    """What `variant` is built of, as its method declares (`Method.ablation`): with parts switched off or changed."""
    from kvcli.methods import get_method

    settings, found = variant.profile.settings.model_dump(), []
    for part, changed in get_method(variant.profile.method).ablation.items():
        name = f"{variant.name}, {part}"
        profile = replace(resolve_profile(variant.profile.method, None, {**settings, **changed}), name=name)
        found.append(Variant(name, variant.budget, profile))
    return found


def variants(
    methods: Sequence[str], profiles: Sequence[str], budgets: Sequence[int], settings: Mapping[str, str]
) -> list[Variant]:
    """Combine what a command line names, methods first, budgets in the order given.

    `settings` go to every method that has them. A method without a budget is there once; without `budgets` the others
    keep their own.

    Raises:
        KvcliError: usage: an unknown name, a value that a method refuses, a setting that no method has, a name twice.
    """
    named = [(name, name, None) for name in methods] + [(name, None, name) for name in profiles]
    fields = {name: known_settings(method, profile) for name, method, profile in named}
    known = {key for keys in fields.values() for key in keys}
    for key in sorted({*settings, *(["budget"] if budgets else [])} - known):
        close = get_close_matches(key, sorted(known), n=1)
        hint = f"did you mean {close[0]!r}?" if close else "see kvcli methods NAME"
        raise usage_error(f"none of {', '.join(fields)} has a setting {key!r}", hint)
    found: dict[str, Variant] = {}
    for name, method, profile in named:
        shared = {key: value for key, value in settings.items() if key in fields[name]}
        for budget in budgets if budgets and "budget" in fields[name] else [None]:
            overrides: dict[str, str | object] = dict(shared)
            if budget is not None:
                overrides["budget"] = budget
            chosen = resolve_profile(method, profile, overrides)
            variant = Variant(chosen.name, getattr(chosen.settings, "budget", None), chosen)
            if variant.label in found:
                what = f"{variant.label} is there twice, as {name!r} again"
                raise usage_error(what, "name each method and profile once")
            found[variant.label] = variant
    return list(found.values())
