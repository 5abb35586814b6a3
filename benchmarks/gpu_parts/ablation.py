"""The parts of recall switched off one by one: those that the paper switches off (FreeKV, figure 9), and two more.

Without speculation every head retrieves before it attends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpu_parts.frame import Row
from gpu_parts.made_up import workshop
from gpu_parts.setting import Setting
from gpu_parts.steps import USUAL, StepCase, compared
from kvcli.methods.freekv import FreeKV

OTHERS: dict[str, dict[str, Any]] = {"copies, all else on": {"recall": "copy"}, "nhd pages": {"host_layout": "nhd"}}


def cases(context: int) -> list[StepCase]:
    """Name the method with all its parts, and without some of them."""
    switched = {"all parts": {}, **FreeKV.ablation, **OTHERS}
    return [
        StepCase.freekv(name, context, corrected=1.0 if settings.get("tau") == 1.0 else USUAL, **settings)
        for name, settings in switched.items()
    ]


def run(setting: Setting, found: Any) -> Iterator[Row]:
    """Yield a row for each combination, timed in turn."""
    with workshop(setting, setting.shape, [setting.short]) as place:
        yield from compared(place, setting, cases(setting.short), found)
