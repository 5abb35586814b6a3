"""Where the time of a captured step goes, by phase: the kernels of its replays, as the profiler saw them.

See `kvcli.bench.phases`: a moment belongs to what the step waits for, the rest of what runs then is hidden.
Tracing makes small kernels a little slower.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from gpu_parts.frame import NotHere, Row
from gpu_parts.made_up import workshop
from gpu_parts.setting import Setting
from gpu_parts.steps import Running, StepCase
from kvcli.bench.phases import parts_of, products_of, traced
from kvcli.capacity.roofline import PHASES

REPLAYS = 8


def run(setting: Setting, found: Any) -> Iterator[Row]:  # noqa: ARG001
    """Yield a row for each phase of each case, and one for the step."""
    if setting.device.type != "cuda":
        raise NotHere("there are no kernels to trace on a CPU")
    context = setting.short
    cases = [StepCase("streaming", "streaming", context)]
    cases += [StepCase.freekv(f"freekv {part:.0%}", context, corrected=part) for part in (0.3, 1.0)]
    with workshop(setting, setting.shape, [context]) as place:
        products = products_of(place.engine.model.module)
        for case in cases:
            one = Running(case, place)
            for _ in range(REPLAYS):
                one.work()
            with traced() as replays:
                for _ in range(REPLAYS):
                    one.work()
            parts = parts_of(replays, products)
            whole = statistics.median(sum(step.exposed.values()) for step in parts) / 1000
            rows = [
                {
                    "phase": phase,
                    "exposed_ms": statistics.median(step.exposed.get(phase, 0.0) for step in parts) / 1000,
                    "hidden_ms": statistics.median(step.hidden.get(phase, 0.0) for step in parts) / 1000,
                }
                for phase in PHASES
            ]
            kernels = statistics.median(len(replay) for replay in replays)
            rows.append({"phase": "step", "exposed_ms": whole, "hidden_ms": 0.0, "kernels": kernels})
            for row in rows:
                yield shown({"case": case.name, "context": context, **row})


def shown(row: Row) -> Row:
    """Print a phase, and pass it on."""
    count = f", {row['kernels']:.0f} kernels" if "kernels" in row else ""
    line = f"  {row['case']:<14} {row['phase']:<12} {row['exposed_ms']:7.3f} ms, hidden {row['hidden_ms']:7.3f}"
    print(line + count, flush=True)
    return row
