"""Papers as sets of profiles: every method with the settings with which a paper ran it, and where it reports that."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from kvcli.errors import usage_error
from kvcli.inputs.profile_file import nearest

PREFIX = "paper-"


class PaperRun(BaseModel):
    """One method as the paper ran it: its settings beside the method's own, and the tables and figures."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    method: str
    where: str
    name: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class Paper:
    """A paper and what it ran."""

    title: str
    paper: str
    runs: tuple[PaperRun, ...]


def paper_names() -> list[str]:
    """Names of the papers, sorted; a set of profiles is called `paper-NAME`."""
    files = (entry.name for entry in (resources.files("kvcli.profiles") / "papers").iterdir())
    return sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml"))


def read_paper(name: str) -> Paper:
    """Find a paper by its name, with or without `paper-` before it.

    Raises:
        KvcliError: there is none (usage); the hint names the nearest.
    """
    name = name.removeprefix(PREFIX)
    if name not in paper_names():
        raise usage_error(f"unknown paper {name!r}", nearest(name, paper_names(), "papers"))
    found = tomllib.loads((resources.files("kvcli.profiles") / "papers" / f"{name}.toml").read_text())
    return Paper(found["title"], found["paper"], tuple(PaperRun(**run) for run in found["run"]))
