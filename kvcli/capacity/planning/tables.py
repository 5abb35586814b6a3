"""Plans as tables and notes; the console renders them."""

from collections.abc import Callable, Sequence

from kvcli.capacity.memory import COMPILER_BYTES, RUNTIME_BYTES
from kvcli.capacity.planning.plan import LONGEST, CapacityPlan
from kvcli.capacity.roofline import MachineRates, rate_rows
from kvcli.capacity.smaller import in_words
from kvcli.models.streamed import WeightStreaming
from kvcli.sizes import format_bytes
from kvcli.ui.summary import Table, duration, without_empty_columns


def tables(title: str, plans: Sequence[CapacityPlan]) -> list[tuple[str, Table]]:
    """Make one row for each combination; a single one also gets a table of its memory and one of its step."""
    found = [(title, _overview(plans))]
    if len(plans) == 1:
        found.append(("memory", _memory(plans[0])))
        if plans[0].times is not None:
            found.append(("roofline of a decode step", _phases(plans[0])))
    return found


def notes(plans: Sequence[CapacityPlan], rates: MachineRates | None, measured: bool) -> list[tuple[str, str]]:
    """Say which figures are measured, counted and estimated: labels with their texts, the times first."""
    kv = ", ".join(dict.fromkeys(plan.kv_basis for plan in plans))
    free = ", ".join(f"{format_bytes(size)} of {pool} memory free" for pool, size in plans[0].free.items())
    rows = [*_time_notes(plans), ("memory", f"{free}; weights counted, KV {kv}, workspace estimated")]
    saved = []
    for plan in {(plan.context, plan.batch): plan for plan in plans}.values():
        loads = "" if plan.load_seconds is None else f", loaded in {plan.load_seconds:,.3g} s"
        saved.append(f"{format_bytes(plan.disk)} for {plan.batch} x {plan.context:,} tokens{loads}")
    tight = [plan for plan in plans if plan.fits_with]
    rows += [("fits with", said) for said in _said_once(tight, lambda plan: in_words(plan.fits_with))]
    rows.append(("saved KV", "; ".join(saved)))
    if (placement := plans[0].placement) is not None:
        parts = (f"{piece.label}, {format_bytes(piece.weights)} of weights" for piece in placement.pieces)
        rows.append(("layers", "; ".join(parts)))
    if (tiered := next((plan for plan in plans if plan.tier is not None), None)) is not None:
        assert tiered.tier is not None
        assert tiered.disk_free is not None
        folder, cache = tiered.tier.folder, format_bytes(tiered.tier.host_bytes)
        place = f"{folder}, {format_bytes(tiered.disk_free)} free; {cache} of host memory cache it"
        rows.append(("disk tier", f"{place}; {_reads(plans)}; steps on a GPU are blocking"))
    if (streaming := plans[0].streaming) is not None:
        said = f"{len(streaming.layers)} layers are streamed from {streaming.where}"
        said += f", and of {format_bytes(streaming.of_experts)} of experts those chosen" if streaming.experts else ""
        said += f"; a step reads {format_bytes(plans[0].step_weights)}"
        unknown = streaming.where == "disk" and plans[0].disk_rate is None
        rows.append(("weights", said + "; times exclude that without --disk-rate" * unknown))
    if rates is not None:
        found = ", ".join(f"{label} {value}" for label, value in rate_rows(rates.as_dict()))
        rows.append(("rates", f"{'measured' if measured else 'given'}: {found}"))
    return rows


def _reads(plans: Sequence[CapacityPlan]) -> str:
    """Describe the disk reads of steps."""
    if plans[0].disk_rate is None:
        return "times exclude its reads; give --disk-rate to include them"
    most = max((plan.times.from_disk for plan in plans if plan.times is not None), default=0)
    return f"a step reads up to {format_bytes(most)} of it if it requests all KV evenly, and waits for the reads"


def _time_notes(plans: Sequence[CapacityPlan]) -> list[tuple[str, str]]:
    """Say on what the times of each row are based, once if that is the same for all."""
    if len({plan.time_basis for plan in plans}) == 1:
        return [("times", plans[0].time_basis)]
    return [("times", said) for said in _said_once(plans, lambda plan: plan.time_basis)]


def _said_once(plans: Sequence[CapacityPlan], say: Callable[[CapacityPlan], str]) -> list[str]:
    """Say something of every row, and of rows for which it is the same once."""
    rows: dict[str, list[str]] = {}
    for plan in plans:
        rows.setdefault(say(plan), []).append(f"{plan.label} at {plan.context:,}, batch {plan.batch}")
    return [f"{'; '.join(named)}: {said}" for said, named in rows.items()]


def _overview(plans: Sequence[CapacityPlan]) -> Table:
    pools = list(plans[0].needed)
    rows = []
    for plan in plans:
        times = plan.times
        rows.append(
            (
                plan.label,
                f"{plan.context:,}",
                str(plan.batch),
                *(format_bytes(plan.needed[pool]) for pool in pools),
                format_bytes(plan.need.kv.disk),
                "yes" if plan.fits else "no",
                f"over {LONGEST:,}" if plan.longest is None else f"{plan.longest:,}" if plan.longest else "none",
                duration(1000 * times.prefill if times else None),
                duration(1000 * times.step if times else None),
                duration(1000 * times.roofline if times else None),
                f"{plan.batch / times.step:,.1f}" if times else "-",
            )
        )
    columns = (
        "method",
        "context",
        "batch",
        *pools,
        "disk",
        "fits",
        "longest",
        "prefill",
        "step",
        "roofline",
        "tokens/s",
    )
    return without_empty_columns(Table(columns, rows, keys=3))


def _memory(plan: CapacityPlan) -> Table:
    need = plan.need
    rows = [
        ("weights", format_bytes(need.weights), "counted"),
        *([] if plan.streaming is None else [_streamed(plan.streaming, plan.step_weights)]),
        ("KV, device", format_bytes(need.kv.device), plan.kv_basis),
        *([("states, of it", format_bytes(need.states), "counted")] if need.states else []),
        ("KV, host", format_bytes(need.kv.host), plan.kv_basis),
        *([("KV, disk", format_bytes(need.kv.disk), plan.kv_basis)] if plan.tier is not None else []),
        ("workspace", format_bytes(need.workspace), "estimated"),
        *((f"{name}, of it", format_bytes(size), "") for name, size in need.prefill.device.items()),
        *([("KV away meanwhile, less", format_bytes(need.prefill.away), "")] if need.prefill.away else []),
        *((f"{name}, host", format_bytes(size), "estimated") for name, size in need.prefill.host.items()),
        ("runtime", format_bytes(RUNTIME_BYTES), "allowed for"),
        *([("compiler", format_bytes(COMPILER_BYTES), "at most, in a first run")] if plan.compiles else []),
        *((f"free, {pool}", format_bytes(size), "") for pool, size in plan.free.items()),
    ]
    return Table(("part", "size", ""), rows, texts=("",))


def _streamed(streaming: WeightStreaming, step: int) -> tuple[str, str, str]:
    how = "estimated" if streaming.experts else "counted"
    return "read in a step", format_bytes(step), f"{how}; weights streamed from {streaming.where}"


def _phases(plan: CapacityPlan) -> Table:
    assert plan.times is not None
    rows = [
        (
            phase,
            format_bytes(work.read),
            format_bytes(work.to_device),
            format_bytes(work.to_host),
            f"{work.operations / 1e9:,.2f}" if work.operations else "0",
            duration(1000 * seconds),
        )
        for phase, (work, seconds) in plan.times.phases.items()
        if seconds
    ]
    columns = ("phase", "read", "to device", "to host", "Gop", "roofline")
    return without_empty_columns(Table(columns, rows))
