"""The steps of another architecture: fewer KV heads, each for more query heads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpu_parts.frame import Row
from gpu_parts.made_up import workshop
from gpu_parts.setting import Setting
from gpu_parts.steps import StepCase, compared


def run(setting: Setting, found: Any) -> Iterator[Row]:
    """Yield a row for each case, timed in turn."""
    context = setting.short
    cases = [
        StepCase("streaming", "streaming", context),
        *(StepCase.freekv(f"freekv {part:.0%}", context, corrected=part) for part in (0.0, 0.3, 1.0)),
        StepCase.freekv("freekv 30%, middle", setting.middle, corrected=0.3),
    ]
    with workshop(setting, setting.other_shape, [context, setting.middle]) as place:
        for row in compared(place, setting, cases, found):
            yield row | {"shape": setting.other_shape}
