"""Lists of cases of which some are tried in every run, in which everything has its turn, and the others on demand."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def crossed(first: Sequence[Any], second: Iterable[Any], turns: int = 3) -> list[Any]:
    """Pair everything of two lists, in the order of the first.

    One pair of every `turns` is not marked `exhaustive`; one of as many as the second list has where these are fewer.
    """
    others = list(second)
    turns = min(turns, len(others))
    return [
        pytest.param(one, other, marks=[pytest.mark.exhaustive] if (place + at) % turns else [])
        for place, one in enumerate(first)
        for at, other in enumerate(others)
    ]


def some(cases: Iterable[Any], always: Collection[Any]) -> list[Any]:
    """Cases of a list; those that are not tried `always` are marked `exhaustive`."""
    return [pytest.param(case, marks=[] if case in always else [pytest.mark.exhaustive]) for case in cases]
