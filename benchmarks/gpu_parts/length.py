"""A decode step at a context thirty-two times as long, with and without a first layer that attends to everything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpu_parts.frame import Row
from gpu_parts.made_up import workshop
from gpu_parts.setting import Setting
from gpu_parts.steps import StepCase, compared


def run(setting: Setting, found: Any) -> Iterator[Row]:
    """Yield a row for each case, timed in turn."""
    contexts = {"short": setting.short, "long": setting.long}
    cases = [
        StepCase.freekv(f"{name}, {dense} dense", context, dense_layers=dense)
        for dense in (1, 0)
        for name, context in contexts.items()
    ]
    with workshop(setting, setting.shape, list(contexts.values())) as place:
        yield from compared(place, setting, cases, found)
