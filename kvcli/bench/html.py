"""A profile as an HTML page: the main result, charts, the same figures as tables, and the machine."""

from kvcli.bench import charts
from kvcli.bench.profiler import Outcome, case_name
from kvcli.bench.report import Case, ProfileReport
from kvcli.bench.tables import headline, largest, notes, tables
from kvcli.capacity.roofline import rate_rows
from kvcli.sizes import format_bytes
from kvcli.telemetry.report import HeadCounts
from kvcli.ui.html import Page
from kvcli.ui.summary import folded

_TABLE_WIDTH = 130  # characters; wider tables would be cut off at the edge of the page
_SHARES = (
    ("corrected", "KV heads that were corrected", "heads_corrected", "heads_checked"),
    ("missed", "selected pages that were not on the device", "misses", "pages_requested"),
)


def page(outcome: Outcome) -> str:
    """Render the whole file."""
    report, model = outcome.report, outcome.report.model
    weights = ", random weights" if model["source"] == "dummy" else ""
    made = Page("Where a decode step goes", f"kvcli profile · {model['name']}{weights} · {model['dtype']}")
    made.text(headline(report))
    made.facts(notes(report))
    _parts(made, report)
    _contexts(made, report)
    made.section("Figures")
    for title, table in tables(report):
        for number, part in enumerate(folded(table, _TABLE_WIDTH)):
            made.table(part, f"{title}, continued" if number else title)
    _timelines(made, outcome)
    _heat_maps(made, report)
    made.section("Hardware and versions")
    made.facts(facts(report))
    return made.render()


def facts(report: ProfileReport) -> list[tuple[str, str]]:
    """List what the figures depend on: labels with their values."""
    model = report.model
    named = [(key.replace("_", " "), str(value)) for key, value in report.environment.items()]
    size = f"{model['layers']} layers, {format_bytes(model['weight_bytes'])} of weights in {model['dtype']}"
    measured = [(label, f"{value}, measured") for label, value in rate_rows(report.ceilings)]
    profiles = {case.label: case.profile for case in report.cases if case.profile is not None}
    settings = [
        (label, ", ".join(f"{key} {value}" for key, value in profile["settings"].items()))
        for label, profile in profiles.items()
    ]
    return [("model", f"{model['name']} ({model['source']}), {size}"), *measured, *settings, *named]


def _parts(made: Page, report: ProfileReport) -> None:
    named = [(_name(case, report), case) for case in report.cases if case.breakdown is not None]
    if named:
        made.section("Phases of a step", "From separate runs with clocks inside. The phases add up to the step.")
        roofline = "The mark across is the roofline: the bytes and operations of the step at the rates measured here."
        made.chart(charts.parts_chart(named), f"Time of a step by phase. {roofline}")


def _contexts(made: Page, report: ProfileReport) -> None:
    if len(report.options["contexts"]) < 2:
        return
    made.section("Step time and context")
    for batch in report.options["batch_sizes"]:
        cases = [case for case in report.cases if case.batch == batch]
        title = f" Batch {batch}." if len(report.options["batch_sizes"]) > 1 else ""
        made.chart(
            charts.context_chart(cases), f"Solid: measured, with minimum and maximum. Dashed: the roofline.{title}"
        )


def _timelines(made: Page, outcome: Outcome) -> None:
    last = largest(outcome.report)
    named = []
    for case in last:
        spans = outcome.spans.get(case_name(case.label, case.context, case.batch))
        if spans:
            named.append((case.label, bool(case.host_kv_bytes), spans))
    if named:
        moves = "Drag to move, Alt and the wheel to zoom, double-click to go back."
        made.section("One step", f"At {_load(last[0])}. {moves}")
        made.chart(
            charts.timeline_chart(named), "The step of median length of each case; where it is blank, the host works."
        )


def _heat_maps(made: Page, report: ProfileReport) -> None:
    cases = [case for case in largest(report) if case.counts is not None and any(map(any, case.counts.misses))]
    if cases:
        made.section("Corrections and recalls", f"At {_load(cases[0])}, by KV head and by step.")
    for case in cases:
        for share in _SHARES:
            _share(made, case, *share)


def _share(made: Page, case: Case, name: str, meaning: str, part: str, whole: str) -> None:
    """Add two heat maps of a share, `part` and `whole` being names of counts in the report."""
    counts = case.counts
    if counts is None or not any(map(any, getattr(counts, whole))):
        return
    layers = [layer or HeadCounts([], [], [], []) for layer in counts.by_head]
    some, every = ([getattr(layer, which) for layer in layers] for which in (part, whole))  # [layers][Hk] each
    heads = charts.share_map(some, every, name, "layer", "KV head")
    some, every = getattr(counts, part), getattr(counts, whole)  # [steps][layers] each
    steps = charts.share_map(some, every, name, "step", "layer")
    captions = (f"{case.label}: {meaning}, by {by}." for by in ("head", "step"))
    made.side_by_side(zip((heads, steps), captions, strict=True))


def _name(case: Case, report: ProfileReport) -> str:
    parts = [case.label]
    if len(report.options["contexts"]) > 1:
        parts.append(f"{case.context // 1024}K" if case.context % 1024 == 0 else f"{case.context:,}")
    if len(report.options["batch_sizes"]) > 1:
        parts.append(f"batch {case.batch}")
    return " · ".join(parts)


def _load(case: Case) -> str:
    return f"{case.context:,} tokens, batch {case.batch}"
