"""Every Triton kernel against its reference on the device, with the cases of the tests at odd and at real sizes.

Each case is compiled and run in a process of its own, several side by side: it is compiling that takes the time.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from gpu_parts.frame import Ended, Row, in_processes
from gpu_parts.setting import Setting

sys.path.append(str(Path(__file__).parents[2] / "tests"))

LIMIT = 60.0  # seconds for one case in all its types and sizes


def run(setting: Setting, found: Any) -> Iterator[Row]:  # noqa: ARG001
    """Yield a row for each case: whether it agrees, and the largest relative error."""
    from triton_cases import CASES

    works = {case.name: partial(check, index, setting) for index, case in enumerate(CASES)}
    at_once = 1 if setting.smoke else min(12, os.cpu_count() or 1)
    for name, message in in_processes(works, LIMIT, at_once):
        row = message if isinstance(message, dict) else {"kernel": name, "agrees": False, "problem": message.error}
        if isinstance(message, Ended) and message.error is None:
            continue
        outcome = f"agrees, error {row['error']:.1e}" if row["agrees"] else f"DIFFERS: {row['problem']}"
        print(f"  {name:<42} {outcome}", flush=True)
        yield row


def check(index: int, setting: Setting) -> Iterator[Row]:
    """Compare one case in all types and sizes; `checked` counts the comparisons."""
    from triton_cases import CASES, ODD, REAL, TOLERANCE, compare

    case, worst, problems, checked = CASES[index], 0.0, [], 0
    for sizes in (ODD,) if setting.smoke else (ODD, REAL):
        for dtype in TOLERANCE:
            outcome = compare(case, dtype, setting.device, sizes)
            checked, worst = checked + 1, max(worst, outcome.error)
            if outcome.problem:
                which = "odd" if sizes is ODD else "real"
                problems.append(f"{str(dtype).removeprefix('torch.')} at {which} sizes: {outcome.problem}")
    yield {
        "kernel": case.name,
        "agrees": not problems,
        "exactly": case.exact,
        "error": worst,
        "checked": checked,
        "problem": "; ".join(problems),
        "ran": setting.ran,
    }
