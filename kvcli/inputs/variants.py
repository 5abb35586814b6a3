"""Variants to compare: methods and profiles with every requested budget, and the comparisons of papers.

A paper is a set of profiles: every method with the settings with which the paper ran it. Its main tables are suites,
each a set of profiles with budgets and sampling, which one command repeats.
"""

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from kvcli.errors import KvcliError, usage_error
from kvcli.inputs.profiles import Profile, known_settings, nearest, resolve_profile

PREFIX = "paper-"


@dataclass(frozen=True)
class Variant:
    """One row of the table: a method or a profile, at one budget if it has that setting."""

    name: str
    budget: int | None
    profile: Profile

    @property
    def label(self) -> str:
        """A name that no other variant of the run has."""
        return self.name if self.budget is None else f"{self.name} {self.budget}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for the JSON report; a budget that is a share is text, such as "20%"."""
        profile = self.profile.as_dict()
        return {"label": self.label, "name": self.name, "budget": profile["settings"].get("budget"), **profile}


def ablated(variant: Variant) -> list[Variant]:
    """Derive the ablations of `variant` that its method declares (`Method.ablation`), with parts off or changed.

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
    """Combine the names of a command line, methods first, budgets in the order given.

    `settings` go to every method that has them; one named `METHOD.KEY` goes to that method or profile alone, and comes
    before a plain one. A method without a budget occurs once; without `budgets` the others
    keep their own. A profile `paper-NAME` stands for everything that a paper ran (`read_paper`).

    Raises:
        KvcliError: usage: an unknown name, a value that a method refuses, a setting that no method has, a name twice.
    """
    named = [_Named(name, name, None) for name in methods]
    for name in profiles:
        named += _of_paper(name) if name.startswith(PREFIX) else [_Named(name, None, name)]
    fields = {each.name: known_settings(each.method, each.profile) for each in named}
    known = {key for keys in fields.values() for key in keys}
    known |= {f"{name}.{key}" for name, keys in fields.items() for key in keys}
    for key in sorted({*settings, *(["budget"] if budgets else [])} - known):
        close = get_close_matches(key, sorted(known), n=1)
        hint = f"did you mean {close[0]!r}?" if close else "see kvcli methods NAME"
        raise usage_error(f"none of {', '.join(fields)} has a setting {key!r}", hint)
    found: dict[str, Variant] = {}
    for each in named:
        shared = dict(each.settings) | {key: value for key, value in settings.items() if key in fields[each.name]}
        own = f"{each.name}."
        shared |= {key.removeprefix(own): value for key, value in settings.items() if key.startswith(own)}
        for budget in budgets if budgets and "budget" in fields[each.name] else [None]:
            overrides: dict[str, str | object] = dict(shared)
            if budget is not None:
                overrides["budget"] = budget
            chosen = resolve_profile(each.method, each.profile, overrides)
            if each.where is not None:
                chosen = replace(chosen, name=each.name, paper=each.where)
            variant = Variant(chosen.name, getattr(chosen.settings, "budget", None), chosen)
            if variant.label in found:
                what = f"{variant.label} is named twice, again as {each.name!r}"
                raise usage_error(what, "name each method and profile once")
            found[variant.label] = variant
    return list(found.values())


def scaled(variants: Iterable[tuple[str, Profile]], shortest: int | None) -> Iterator[str]:
    """Say which of the labelled profiles scale sink and window, also where a budget is a share of a prompt.

    `shortest` is the shortest prompt in tokens, if it is known.
    """
    for label, profile in variants:
        notice = profile.notice
        if shortest is not None:
            with suppress(KvcliError):  # a method that refuses the budget says so where it is used
                notice = profile.for_prompt(shortest).notice
        if notice is not None:
            yield f"{label}: {notice}"


def where_settings_go(settings: Sequence[str], variants: Sequence[Variant]) -> Iterator[str]:
    """Say which methods lack one of the `settings`, and what it is for each if it is not the same for all."""
    for key in settings:
        meanings: dict[str, list[str]] = {}
        for variant in variants:
            field = type(variant.profile.settings).model_fields.get(key.rpartition(".")[2])
            if "." not in key or key.startswith(f"{variant.name}."):
                meaning = "" if field is None else (field.description or "").partition(",")[0]
                meanings.setdefault(meaning, []).append(variant.name)
        lacking, has = meanings.pop("", []), list(meanings.items())
        if len(has) > 1:
            each = (f"{', '.join(dict.fromkeys(names))}: {meaning}" for meaning, names in has)
            yield f"{key} is for {'; for '.join(each)}. To set it for one method, use --set METHOD.{key}=VALUE"
        if lacking:
            yield f"{', '.join(dict.fromkeys(lacking))}: no setting {key}, which goes to the others"


class _Named(NamedTuple):
    """A name on a command line: a method or a profile, or one of a paper's with its settings and source."""

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


class PaperRun(BaseModel):
    """One method as the paper ran it: its settings that differ from the method's own, and the tables and figures."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    method: str
    where: str
    name: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class Paper:
    """A paper and its runs."""

    title: str
    paper: str
    runs: tuple[PaperRun, ...]


def paper_names() -> list[str]:
    """List the names of the papers, sorted; a set of profiles is called `paper-NAME`."""
    files = (entry.name for entry in (resources.files("kvcli.profiles") / "papers").iterdir())
    return sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml"))


def read_paper(name: str) -> Paper:
    """Find a paper by its name, with or without the prefix `paper-`.

    Raises:
        KvcliError: there is none (usage); the hint names the nearest.
    """
    name = name.removeprefix(PREFIX)
    if name not in paper_names():
        raise usage_error(f"unknown paper {name!r}", nearest(name, paper_names(), "papers"))
    found = tomllib.loads((resources.files("kvcli.profiles") / "papers" / f"{name}.toml").read_text())
    return Paper(found["title"], found["paper"], tuple(PaperRun(**run) for run in found["run"]))


class TableSuite(BaseModel):
    """The methods that a paper's table compares, and how; `budgets` as --budget takes them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    profile: str
    table: str
    files: str
    budgets: list[str] = Field(default_factory=list)
    max_length: int | None = None
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0


@cache
def suites() -> dict[str, TableSuite]:
    """Return every suite by name."""
    text = resources.files("kvcli.inputs").joinpath("suites.toml").read_text("utf-8")
    return {name: TableSuite.model_validate(entry) for name, entry in tomllib.loads(text).items()}


def table_suite(name: str) -> TableSuite:
    """Return the suite of that name.

    Raises:
        KvcliError: there is none (usage); the hint names the nearest.
    """
    if name not in suites():
        raise usage_error(f"unknown suite {name!r}", nearest(name, list(suites()), "suites"))
    return suites()[name]
