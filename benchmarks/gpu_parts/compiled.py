"""The same steps with what lies between the attentions compiled, after those that run it in few kernels.

Both put something in the place of the model's own modules, so that one kind has ended before the other is built.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gpu_parts.clock import freed
from gpu_parts.frame import NotHere, Row
from gpu_parts.made_up import workshop
from gpu_parts.setting import Setting
from gpu_parts.steps import StepCase, compared


def run(setting: Setting, found: Any) -> Iterator[Row]:
    """Yield a row for each case, timed in turn."""
    if setting.device.type != "cuda":
        raise NotHere("what a compiler makes for a CPU says nothing of a GPU")
    context = setting.short
    plain = [StepCase("streaming", "streaming", context), StepCase.freekv("freekv", context)]
    with workshop(setting, setting.shape, [context]) as place:
        yield from compared(place, setting, plain, found)
        freed(setting.device)
        others = [replace(case, name=f"{case.name}, compiled", compiled=True) for case in plain]
        yield from compared(place, setting, others, found)
