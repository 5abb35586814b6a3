"""Lists of cases of which some are tried in every run, in which everything has its turn, and the others on demand."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def crossed(first: Sequence[Any], second: Iterable[Any]) -> list[Any]:
    """Pair everything of two lists, in the order of the first.

    Two thirds of the pairs are marked `exhaustive`; half of them where the second list has two entries.
    """
    others = list(second)
    turns = min(3, len(others))
    return [
        pytest.param(one, other, marks=[pytest.mark.exhaustive] if (place + at) % turns else [])
        for place, one in enumerate(first)
        for at, other in enumerate(others)
    ]


def some(cases: Iterable[Any], always: Collection[Any]) -> list[Any]:
    """Cases of a list; those that are not tried `always` are marked `exhaustive`."""
    return [pytest.param(case, marks=[] if case in always else [pytest.mark.exhaustive]) for case in cases]
