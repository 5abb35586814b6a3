"""What is compared: methods and profiles, each with every budget that is asked for."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, NamedTuple

from kvcli.errors import KvcliError, usage_error
from kvcli.inputs.papers import PREFIX, read_paper
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
    """What `variant` is built of, as its method declares (`Method.ablation`): with parts switched off or changed.

    A part that does not go with the variant's settings, such as groups larger than its budget, is left out.
    """
    from kvcli.methods import get_method

    settings, found = variant.profile.settings.model_dump(), []
    for part, changed in get_method(variant.profile.method).ablation.items():
        name = f"{variant.name}, {part}"
        with suppress(KvcliError):
            profile = replace(resolve_profile(variant.profile.method, None, {**settings, **changed}), name=name)
            found.append(Variant(name, variant.budget, profile))
    return found


def variants(
    methods: Sequence[str], profiles: Sequence[str], budgets: Sequence[int], settings: Mapping[str, str]
) -> list[Variant]:
    """Combine what a command line names, methods first, budgets in the order given.

    `settings` go to every method that has them. A method without a budget is there once; without `budgets` the others
    keep their own. A profile `paper-NAME` stands for all that a paper ran (`kvcli.inputs.papers`).

    Raises:
        KvcliError: usage: an unknown name, a value that a method refuses, a setting that no method has, a name twice.
    """
    named = [_Named(name, name, None) for name in methods]
    for name in profiles:
        named += _of_paper(name) if name.startswith(PREFIX) else [_Named(name, None, name)]
    fields = {each.name: known_settings(each.method, each.profile) for each in named}
    known = {key for keys in fields.values() for key in keys}
    for key in sorted({*settings, *(["budget"] if budgets else [])} - known):
        close = get_close_matches(key, sorted(known), n=1)
        hint = f"did you mean {close[0]!r}?" if close else "see kvcli methods NAME"
        raise usage_error(f"none of {', '.join(fields)} has a setting {key!r}", hint)
    found: dict[str, Variant] = {}
    for each in named:
        shared = dict(each.settings) | {key: value for key, value in settings.items() if key in fields[each.name]}
        for budget in budgets if budgets and "budget" in fields[each.name] else [None]:
            overrides: dict[str, str | object] = dict(shared)
            if budget is not None:
                overrides["budget"] = budget
            chosen = resolve_profile(each.method, each.profile, overrides)
            if each.where is not None:
                chosen = replace(chosen, name=each.name, paper=each.where)
            variant = Variant(chosen.name, getattr(chosen.settings, "budget", None), chosen)
            if variant.label in found:
                what = f"{variant.label} is there twice, as {each.name!r} again"
                raise usage_error(what, "name each method and profile once")
            found[variant.label] = variant
    return list(found.values())


class _Named(NamedTuple):
    """What a command line names: a method or a profile, or one of a paper's with its settings and source."""

    name: str
    method: str | None
    profile: str | None
    settings: Mapping[str, str | object] = {}
    where: str | None = None


def _of_paper(name: str) -> list[_Named]:
    paper = read_paper(name)
    return [
        _Named(run.name or run.method, run.method, None, run.settings, f"{paper.paper}, {run.where}")
        for run in paper.runs
    ]
