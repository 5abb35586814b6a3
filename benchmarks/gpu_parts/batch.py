"""Batches: what more sequences at once give, and what recall costs that is blocking, page by page and NHD."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpu_parts.clock import freed
from gpu_parts.frame import Row
from gpu_parts.made_up import workshop
from gpu_parts.setting import Setting
from gpu_parts.steps import StepCase, compared

FEW = 2
"""Rounds of what takes seconds a step, and hundreds of times as long as what it is held against."""

PAGE_BY_PAGE: dict[str, Any] = {"recall": "copy", "double_buffer": False}


def run(setting: Setting, found: Any) -> Iterator[Row]:
    """Yield a row for each case; `corrected` 1 is retrieval of all heads before attention: blocking."""
    context, few = setting.short, setting.few
    several = [StepCase.freekv("batch 1", context), StepCase.freekv("batch many", context, setting.many)]
    blocking = [
        StepCase.freekv("overlapped", context, few),
        StepCase.freekv("page by page, hnd", context, few, 1.0, **PAGE_BY_PAGE),
        StepCase.freekv("page by page, nhd", context, few, 1.0, **PAGE_BY_PAGE, host_layout="nhd"),
    ]
    with workshop(setting, setting.shape, [context]) as place:
        yield from compared(place, setting, several, found)
        freed(setting.device)
        yield from compared(place, setting, blocking, found, FEW)
