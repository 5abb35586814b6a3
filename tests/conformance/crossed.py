"""Parametrise tests so that some cases run every time, each value among them, and the others on demand."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def crossed(first: Sequence[Any], second: Iterable[Any], turns: int = 3) -> list[Any]:
    """Pair every element of two lists, in the order of the first.

    One pair in `turns` runs every time, or one in as many as the second list has, if fewer; the others are marked
    `exhaustive`.
    """
    others = list(second)
    turns = min(turns, len(others))
    return [
        pytest.param(one, other, marks=[pytest.mark.exhaustive] if (place + at) % turns else [])
        for place, one in enumerate(first)
        for at, other in enumerate(others)
    ]


def some(cases: Iterable[Any], always: Collection[Any]) -> list[Any]:
    """Return the cases as parameters; those not in `always` are marked `exhaustive`."""
    return [pytest.param(case, marks=[] if case in always else [pytest.mark.exhaustive]) for case in cases]
