"""The same steps with what lies between the attentions compiled, beside those that run it as transformers wrote it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

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
    fused = [replace(case, name=f"{case.name}, compiled", compiled=True) for case in plain]
    with workshop(setting, setting.shape, [context]) as place:
        yield from compared(place, setting, plain + fused, found)
