"""A decode step of every method that a graph serves, each timed in turn with freekv.

One method stands beside freekv at a time, because many keep all KV on the device; both begin anew, because a step more
is a token more. Queries of made-up models turn
completely from step to step: what recalls by the query recalls most of its budget, which is its worst case. What
freekv corrects and exchanges is forced (`steps.USUAL`, `steps.TURNOVER`).

`throughput` is ShadowKV against full attention, each at the largest batch whose KV fits (arXiv 2410.21465, table 3).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from gpu_parts.clock import freed, in_turn
from gpu_parts.contenders import SERVED
from gpu_parts.frame import Row, describe
from gpu_parts.made_up import Workshop, workshop
from gpu_parts.setting import Setting
from gpu_parts.steps import Running, StepCase, compared, row_of, shown

FILLED = 0.85  # of what is free on the device, by the sequences of the largest batch


def short(setting: Setting, found: Any) -> Iterator[Row]:
    """Yield a row a method at the short context."""
    yield from beside_freekv(setting, found, "methods_short", setting.short, 1)


def middle(setting: Setting, found: Any) -> Iterator[Row]:
    """Yield a row a method at the middle context."""
    yield from beside_freekv(setting, found, "methods_middle", setting.middle, 1)


def batch(setting: Setting, found: Any) -> Iterator[Row]:
    """Yield a row a method for a batch at the short context."""
    yield from beside_freekv(setting, found, "methods_batch", setting.short, setting.many)


def beside_freekv(setting: Setting, found: Any, part: str, context: int, batch: int) -> Iterator[Row]:
    """Yield a row for each method that `found` has none of yet; one that fails leaves its error."""
    known = {row["case"] for row in found.get(part, {"rows": []})["rows"]}
    with workshop(setting, setting.shape, [context]) as place:
        for name in SERVED:
            if name in known:
                continue
            cases = [StepCase.freekv("freekv", context, batch), StepCase(name, name, context, batch)]
            try:
                freekv, row = compared(place, setting, cases, found)
                yield row | {"freekv_ms": freekv["rounds_ms"]}
            except (RuntimeError, ValueError) as error:  # out of memory, too
                print(f"  {name}: {describe(error)}", flush=True)
                yield {"case": name, "context": context, "batch": batch, "error": describe(error)}
            freed(setting.device)


def throughput(setting: Setting, found: Any) -> Iterator[Row]:
    """Yield a row for each of the two: its largest batch, and its tokens a second."""
    context = setting.middle - setting.middle // 16
    for name in ("full", "shadowkv"):
        with workshop(setting, setting.shape, [context]) as place:
            many = largest(place, name, context)
            one = Running(StepCase(name, name, context, many), place, copied=True)
            extra = one.looped(max(2, setting.calls))
            times = in_turn({name: (one.work, setting.calls)}, setting.repeats, setting.device, setting.deadline)
            yield shown(row_of(one, times[name], found) | extra)
            one.stepper.finish()
        del one, place
        freed(setting.device)


def largest(place: Workshop, name: str, context: int) -> int:
    """Count the sequences whose KV fits on the device; on a CPU, few."""
    setting = place.setting
    if setting.device.type != "cuda":
        return setting.few
    (sequence,) = place.sequences(place.profile(name), context)
    each = sequence.method.footprint().device
    del sequence
    freed(setting.device)
    return max(1, int(FILLED * torch.cuda.mem_get_info(setting.device)[0]) // each)
