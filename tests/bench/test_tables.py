"""A profile as tables and as a page."""

import json
import re
from dataclasses import replace

import pytest

from kvcli.bench.html import page
from kvcli.bench.profiler import Outcome, case_name
from kvcli.bench.report import (
    Breakdown,
    Case,
    Counts,
    PhaseTime,
    ProfileReport,
    Spread,
    headline,
    notes,
    parts_table,
    steps_table,
    tables,
)
from kvcli.telemetry.report import HeadCounts
from kvcli.telemetry.timeline import Span
from kvcli.ui import html as pages

PHASES = ("projections", "attention", "mlp", "score", "select", "recall", "correction", "offload", "sampling", "host")


def case(label="full", context=1024, batch=1, ms=2.0, offloaded=False, hidden=0.0):
    parts = [PhaseTime(phase, ms / 2 if phase in ("attention", "host") else 0.0, 0.0, ms / 20) for phase in PHASES]
    parts[5] = replace(parts[5], hidden_ms=hidden)
    steps, layers = 3, 2
    return Case(
        label=label,
        kind="method",
        context=context,
        batch=batch,
        profile={"settings": {"budget": 96}},
        runs_ms=[ms, ms],
        step_ms=Spread(ms, 0.9 * ms, 1.2 * ms),
        tokens_per_s=1000 * batch / ms,
        ratio=Spread(2.0 / ms, 1.0 / ms, 3.0 / ms),
        floor_ms=ms / 2,
        breakdown=Breakdown(ms, 4, parts, Spread(1.05, 0.98, 1.1)),
        counts=Counts(
            heads_checked=[[0, 4]] * steps if offloaded else [[0, 0]] * steps,
            heads_corrected=[[0, 1]] * steps if offloaded else [[0, 0]] * steps,
            pages_requested=[[0, 10]] * steps,
            misses=[[0, 5], [0, 0], [0, 10]] if offloaded else [[0] * layers] * steps,
            bytes_to_device=[[0, 4096]] * steps if offloaded else [[0, 0]] * steps,
            bytes_exposed=[[0, 1024]] * steps if offloaded else [[0, 0]] * steps,
            by_head=[None, HeadCounts([15, 15], [15, 0], [6, 6], [3, 0])] if offloaded else [None, None],
        ),
        device_kv_bytes=4096,
        host_kv_bytes=8192 if offloaded else 0,
    )


FAILED = Case("quest", "method", 1024, 1, {"settings": {}}, error="out of memory")
PEER = replace(case("transformers", ms=4.0), kind="peer", profile=None, breakdown=None, counts=None, floor_ms=None)


def report(*cases, **options):
    rate = {"median": 2.0**30, "least": 1.0, "most": 1.0}
    return ProfileReport(
        environment={"torch": "2", "device": "EPYC", "threads": 1, "cores": 2, "load": 0.5},
        model={
            "name": "tiny",
            "source": "dummy",
            "dtype": "float32",
            "device": "cpu",
            "layers": 2,
            "weight_bytes": 1 << 20,
        },
        options={
            "kv": "made up",
            "contexts": sorted({each.context for each in cases}),
            "batch_sizes": sorted({each.batch for each in cases}),
            "steps": 3,
            "warmup": 1,
            "repeat": 2,
            **options,
        },
        ceilings=dict.fromkeys(("read", "copy", "to_device", "to_host", "matmul"), rate),
        cases=list(cases),
    )


def columns(table):
    return {name: [row[i] for row in table.rows] for i, name in enumerate(table.columns)}


def test_a_table_of_steps_has_spread_ratio_and_roofline():
    found = columns(steps_table([case(), case("freekv", ms=1.0, offloaded=True), FAILED, PEER]))
    assert found[""] == ["full", "freekv", "quest", "transformers"]
    assert found["step"] == ["2.00 ms", "1.00 ms", "out of memory", "4.00 ms"]
    assert found["min to max"][0] == "1.80 ms to 2.40 ms"
    assert found["speedup"][1] == "2.00x (1.00 to 3.00)"
    assert found["of roofline"] == ["2.0x", "2.0x", "-", "-"]
    assert found["KV heads corrected"] == ["-", "3 / 12 (25.0 %)", "-", "-"]
    assert found["page misses"] == ["-", "15 / 30 (50.0 %)", "-", "-"]
    assert found["recalled a step"] == ["-", "4.00 KiB", "-", "-"]
    assert found["exposed"] == ["-", "25%", "-", "-"]


def test_a_disk_has_its_columns_beside_host_memory():
    counts = replace(
        case(offloaded=True).counts,
        host_hits=[[0, 3]] * 3,
        disk_reads=[[0, 1]] * 3,
        bytes_from_disk=[[0, 2048], [0, 0], [0, 1024]],
        bytes_to_disk=[[0, 0]] * 3,
        disk_wait_ms=[[0.0, 0.5], [0.25, 0.25], [0.0, 0.5]],
    )
    lying = replace(case("offload", offloaded=True), counts=counts, disk_kv_bytes=16384)
    found = columns(steps_table([case(), lying, FAILED]))
    assert found["host hits"] == ["-", "9 / 12 (75.0 %)", "-"]
    assert found["from disk a step"] == ["-", "1.00 KiB", "-"]
    assert found["waited for it"] == ["-", "500 us", "-"]
    assert found["KV host"] == ["-", "8.00 KiB", "-"]
    assert found["KV disk"] == ["-", "16.0 KiB", "-"]


def test_columns_that_say_nothing_are_left_out():
    assert not {"host hits", "from disk a step", "waited for it", "KV disk"} & {*steps_table([case()]).columns}
    assert "KV heads corrected" not in steps_table([case()]).columns
    assert "recall" not in parts_table([case()]).columns
    assert parts_table([PEER]).rows == []


def test_a_table_of_parts_shows_what_is_hidden_and_how_far_it_was_disturbed():
    found = columns(parts_table([case(), case("freekv", hidden=0.25)]))
    assert found[""] == ["full", "  of roofline", "freekv", "  of roofline"]
    assert found["attention"] == ["1.00", "10.0x", "1.00", "10.0x"]
    assert found["overlapped"] == ["-", "", "recall 0.250", ""]
    assert found["overhead"][0] == "+5%"


def test_each_context_and_batch_size_has_its_tables():
    titles = [title for title, _ in tables(report(case(), case(batch=2), case(context=2048), FAILED))]
    assert titles[:3] == [
        "step at 1,024 tokens, batch 1",
        "phases of a step at 1,024 tokens, batch 1, ms",
        "step at 1,024 tokens, batch 2",
    ]


def test_notes_say_what_the_kv_was():
    made_up, read = (dict(notes(report(case(), kv=kv))) for kv in ("made up", "read"))
    assert made_up["KV"] == "seeded noise, not of a text"
    assert read["KV"] == "of prompts that the model prefilled"
    assert made_up["weights"].startswith("random")
    assert list(made_up)[:2] == ["runs", "KV"]
    assert "memory read" in made_up["roofline"]


@pytest.mark.parametrize(
    ("cases", "expected"),
    [
        ([case(ms=4.0), FAILED, case("freekv", ms=1.0), case("quest", ms=2.0), replace(PEER, context=1024)],
         "At 1,024 tokens, batch 1, a decode step of freekv takes 1.00 ms and one of full 4.00 ms, "
         "a speedup of 2.00x (1.00 to 3.00)."),
        ([case(), case("quest", ms=1.5)],
         "At 1,024 tokens, batch 1, a decode step of quest takes 1.50 ms and one of full 2.00 ms, "
         "a speedup of 1.33x (0.67 to 2.00); the runs vary too much to tell them apart."),
        ([case(context=512), case(context=2048, ms=3.0)],
         "At 2,048 tokens, batch 1, a decode step of full takes 3.00 ms, 2.0x its roofline."),
        ([FAILED], ""),
        ([], ""),
    ],
)  # fmt: skip
def test_the_headline_is_the_fastest_at_the_largest_load(cases, expected):
    assert headline(report(*cases)) == expected


@pytest.fixture
def shown(monkeypatch):
    monkeypatch.setattr(pages, "_bundle", lambda: "")
    spans = [Span("attention", "sequence 0", 1000, 3000, 0, {"layer": 1}), Span("step", "run", 0, 4000)]

    def show(*cases):
        found = {case_name(each.label, each.context, each.batch): spans for each in cases if each.breakdown}
        html = page(Outcome(report(*cases), found))
        charts = re.findall(r'<script type="application/vega-lite\+json">(.*?)</script>', html, re.DOTALL)
        return html, [json.loads(chart) for chart in charts]

    return show


def values(chart):
    return [row for layer in chart.get("layer", [chart]) for row in layer["data"]["values"]]


def test_a_page_has_the_pictures_and_the_figures(shown):
    html, charts = shown(
        case(), case("freekv", offloaded=True), case(context=2048), case("freekv", 2048, offloaded=True)
    )
    parts, contexts, timeline, corrected_heads, corrected, missed_heads, missed = charts
    assert {row["phase"] for row in values(parts) if "phase" in row} == set(PHASES)
    assert {row["case"] for row in values(parts)} == {"full · 1K", "freekv · 1K", "full · 2K", "freekv · 2K"}
    assert [row["roofline"] for row in values(parts) if "roofline" in row] == [1.0] * 4
    assert {row["context"] for row in values(contexts)} == {1024, 2048}
    assert len({row["x"] for row in values(contexts)}) == 4, "points of several methods do not cover each other"
    assert [(row["start"], row["end"], row["layer"]) for row in values(timeline)] == [(1, 3, 1)] * 2
    assert {row["share"] for row in values(corrected)} == {0.25}
    assert [(row["step"], row["layer"], row["share"]) for row in values(missed)] == [
        (f"{step}", "1", share) for step, share in enumerate([0.5, 0, 1])
    ]
    for chart, shares in ((corrected_heads, [0.5, 0]), (missed_heads, [1, 0])):
        found = [(row["layer"], row["KV head"], row["share"]) for row in values(chart)]
        assert found == [("1", f"{head}", share) for head, share in enumerate(shares)]
    assert html.count("<table>") == 6
    assert html.count("<caption>step at 1,024 tokens, batch 1, continued</caption>") == 1
    assert "1.1 GB/s, measured" in html


def test_hidden_time_is_a_bar_of_its_own(shown):
    _, charts = shown(case("freekv", hidden=0.25))
    assert [row["ms"] for row in values(charts[0]) if row["case"] == "freekv, overlapped"] == [0.25]


def test_what_there_is_nothing_of_is_left_out(shown):
    html, charts = shown(case(), FAILED)
    assert len(charts) == 2
    assert "<h2>Corrections" not in html
    assert "Step time and context" not in html
    html, charts = shown(PEER)
    assert charts == []
    assert "transformers" in html
