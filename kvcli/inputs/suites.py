"""The papers' main tables as evaluations: a set of profiles with budgets and sampling, which one command repeats."""

import tomllib
from functools import cache
from importlib import resources

from pydantic import BaseModel, ConfigDict, Field

from kvcli.errors import usage_error
from kvcli.inputs.profile_file import nearest


class TableSuite(BaseModel):
    """What a paper's table compares and how; `budgets` as --budget takes them."""

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
