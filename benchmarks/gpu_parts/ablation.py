"""The parts of recall switched off one by one, as the paper does: layout, double buffering, speculation.

(FreeKV, section 5.4.) Without speculation every head retrieves before it attends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpu_parts.frame import Row
from gpu_parts.made_up import workshop
from gpu_parts.setting import Setting
from gpu_parts.steps import USUAL, Case, compared


def cases(context: int) -> list[Case]:
    """Name every combination that differs; a gather has no buffers."""
    made = []
    for recall, buffers in (("gather", None), ("copy", True), ("copy", False)):
        for layout in ("hnd", "nhd"):
            for speculation in (True, False):
                settings: dict[str, Any] = {"recall": recall, "host_layout": layout}
                settings |= {} if buffers is None else {"double_buffer": buffers}
                name = f"{recall} {layout}" + ({True: " two buffers", False: " one buffer"}.get(buffers) or "")
                name += "" if speculation else " unspeculative"
                made.append(Case.freekv(name, context, corrected=USUAL if speculation else 1.0, **settings))
    return made


def run(setting: Setting, found: Any) -> Iterator[Row]:
    """Yield a row for each combination, timed in turn."""
    with workshop(setting, setting.shape, [setting.short]) as place:
        yield from compared(place, setting, cases(setting.short), found)
