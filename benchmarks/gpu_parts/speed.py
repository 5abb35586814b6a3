"""A decode step at a short context: speculative retrieval at several rates, a sliding window, everything resident."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpu_parts.frame import Row
from gpu_parts.made_up import workshop
from gpu_parts.setting import Setting
from gpu_parts.steps import StepCase, compared

CORRECTED = (0.0, 0.1, 0.3, 1.0)


def run(setting: Setting, found: Any) -> Iterator[Row]:
    """Yield a row for each case, timed in turn."""
    context = setting.short
    cases = [StepCase("streaming", "streaming", context), StepCase("full", "full", context)]
    cases += [StepCase.freekv(f"freekv {part:.0%}", context, corrected=part) for part in CORRECTED]
    with workshop(setting, setting.shape, [context]) as place:
        yield from compared(place, setting, cases, found)
