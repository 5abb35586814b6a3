"""A decode step of every method, each timed in turn with freekv: those that a graph serves, and those in pieces.

One method stands beside freekv at a time, because many keep all KV on the device; both begin anew, because a step more
is a token more. Queries of made-up models turn completely from step to step: what recalls by the query recalls most of
its budget, which is its worst case. What freekv corrects and exchanges is forced (`steps.USUAL`, `steps.TURNOVER`).

A method that fails, or does not end in the time of its part, leaves a row that says so; when the part goes on, those
that were not tried yet come first.

`throughput` is ShadowKV against full attention, each at the largest batch whose KV fits (arXiv 2410.21465, table 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from gpu_parts.clock import freed, in_turn
from gpu_parts.frame import Found, Rows, describe
from gpu_parts.made_up import Workshop, workshop
from gpu_parts.setting import Setting
from gpu_parts.steps import Running, StepCase, compared, row_of, shown
from gpu_parts.targets import BY_GRAPH, IN_PIECES, OFFLOADING, Contender
from kvcli.capacity.memory import available, planned_method
from kvcli.errors import KvcliError

GIB = 1 << 30
FILLED = 0.85  # of what is free on the device and the host, by the sequences of the largest batch


def methods_short(setting: Setting, found: Found) -> Iterator[Rows]:
    """Yield a row a method at the short context."""
    yield from beside_freekv(setting, found, BY_GRAPH, setting.short)


def methods_middle(setting: Setting, found: Found) -> Iterator[Rows]:
    """Yield a row a method at the middle context."""
    yield from beside_freekv(setting, found, BY_GRAPH, setting.middle)


def methods_batch(setting: Setting, found: Found) -> Iterator[Rows]:
    """Yield a row a method for a batch at the short context."""
    yield from beside_freekv(setting, found, BY_GRAPH, setting.short, setting.many)


def methods_large(setting: Setting, found: Found) -> Iterator[Rows]:
    """Yield a row a method that offloads, for a batch at the middle context; the sequences begin as copies."""
    yield from beside_freekv(setting, found, OFFLOADING, setting.middle, setting.many, copied=True)


def methods_pieces(setting: Setting, found: Found) -> Iterator[Rows]:
    """Yield a row a method that is served in pieces, at the short context."""
    yield from beside_freekv(setting, found, IN_PIECES, setting.short)


def beside_freekv(
    setting: Setting,
    found: Found,
    contenders: Sequence[Contender],
    context: int,
    batch: int = 1,
    copied: bool = False,
) -> Iterator[Rows]:
    """Yield a row for each contender that `found` has no figures of yet, and before it one that says it was begun."""
    tried = {row["case"] for row in found.own}
    waiting = sorted((each for each in contenders if not found.has(each.name)), key=lambda each: each.name in tried)
    with workshop(setting, setting.shape, [context]) as place:
        for each in waiting:
            known = {"case": each.name, "method": each.method, "context": context, "batch": batch}
            yield [known | {"failed": "it did not end in the time of its part"}]
            cases = [
                StepCase.freekv("freekv", context, batch),
                StepCase(each.name, each.method, context, batch, settings=each.settings),
            ]
            try:
                fit(place, cases)
                ((freekv, row),) = compared(place, setting, cases, found, copied=copied)
                yield [row | {"freekv_ms": freekv["rounds_ms"]}]
            except (RuntimeError, ValueError, KvcliError) as error:  # out of memory, too
                print(f"  {each.name}: {describe(error)}", flush=True)
                yield [known | {"failed": describe(error)}]
            freed(setting.device)


def fit(place: Workshop, cases: Sequence[StepCase]) -> None:
    """Raise ValueError where the device has no room for all cases at once."""
    setting, model, wanted = place.setting, place.engine.model, 0
    if setting.device.type != "cuda":
        return
    for case in cases:
        profile, room = place.profile(case.method, **case.settings), case.context + setting.spare
        method = planned_method(profile, model.geometry, room, setting.dtype, case.context)
        wanted += case.batch * method.footprint().device
    free = int(FILLED * torch.cuda.mem_get_info(setting.device)[0])
    if wanted > free:
        raise ValueError(f"{wanted / GIB:.0f} GiB on the device, where there is room for {free / GIB:.0f}")


def throughput(setting: Setting, found: Found) -> Iterator[Rows]:
    """Yield a row for each of the two: its largest batch, and its tokens a second."""
    context = setting.middle - setting.middle // 16
    for name in ("full", "shadowkv"):
        if found.has(name):
            continue
        with workshop(setting, setting.shape, [context]) as place:
            many, pool = largest(place, name, context)
            one = Running(StepCase(name, name, context, many), place, copied=True)
            extra = one.looped(max(2, setting.calls))
            times = in_turn({name: (one.work, setting.calls)}, setting.repeats, setting.device, setting.deadline)
            yield [shown(row_of(one, times[name], found) | extra | {"limited_by": pool})]
            one.stepper.finish()
        del one, place
        freed(setting.device)


def largest(place: Workshop, name: str, context: int) -> tuple[int, str]:
    """Count the sequences whose KV fits, and name the memory that holds no more; on a CPU, few.

    KV in host memory has to fit there too, although here all sequences share a pool.
    """
    setting = place.setting
    if setting.device.type != "cuda":
        return setting.few, "device"
    (sequence,) = place.sequences(place.profile(name), context)
    held = sequence.method.footprint()
    del sequence
    freed(setting.device)
    free, needed = available(setting.device), {"device": held.device, "host": held.host}
    room = {pool: int(FILLED * free[pool]) // size for pool, size in needed.items() if size}
    pool = min(room, key=lambda each: room[each])
    return max(1, room[pool]), pool
