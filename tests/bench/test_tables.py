"""A profile as tables, as a page and as a picture."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from pictures import texts_of
from reports import FAILED, PEER, PHASES, case, profile_of

from kvcli.bench.html import figure, page
from kvcli.bench.profiler import Outcome, case_name
from kvcli.bench.report import headline, notes, parts_table, steps_table, tables
from kvcli.telemetry.timeline import Span
from kvcli.ui import html as pages


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
    titles = [title for title, _ in tables(profile_of(case(), case(batch=2), case(context=2048), FAILED))]
    assert titles[:3] == [
        "step at 1,024 tokens, batch 1",
        "phases of a step at 1,024 tokens, batch 1, ms",
        "step at 1,024 tokens, batch 2",
    ]


def test_notes_say_what_the_kv_was():
    made_up, read = (dict(notes(profile_of(case(), kv=kv))) for kv in ("made up", "read"))
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
    assert headline(profile_of(*cases)) == expected


@pytest.fixture
def shown(monkeypatch):
    monkeypatch.setattr(pages, "_bundle", lambda: "")
    spans = [Span("attention", "sequence 0", 1000, 3000, 0, {"layer": 1}), Span("step", "run", 0, 4000)]

    def show(*cases):
        found = {case_name(each.label, each.context, each.batch): spans for each in cases if each.breakdown}
        html = page(Outcome(profile_of(*cases), found))
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


def picture_of(made):
    """The texts of a picture as SVG, and the notes on it."""
    content, notes = figure(made, Path("a.svg"))
    return texts_of(content), notes


@pytest.mark.parametrize(("suffix", "start"), [(".svg", "<svg"), (".pdf", b"%PDF"), (".png", b"\x89PNG")])
def test_a_picture_is_made_in_every_format(suffix, start):
    assert figure(profile_of(case(), case("freekv", ms=1.0)), Path("a" + suffix)).content.startswith(start)


def test_a_picture_of_one_context_is_a_bar_of_phases_for_each_case():
    texts, notes = picture_of(profile_of(case(), case("freekv", ms=1.0, offloaded=True, hidden=0.5), FAILED, PEER))
    assert {"full", "freekv", "freekv, overlapped", "attention", "recall", "host", "milliseconds a step"} <= set(texts)
    assert "sampling" not in texts
    assert notes == ["a.svg does not show quest, transformers, of which it has no phases"]


def test_a_picture_of_several_contexts_is_a_line_for_each_method_and_a_chart_for_each_batch():
    cases = [
        case(label, context, batch, ms=context / 1024)
        for context in (1024, 4096)
        for batch in (1, 2)
        for label in ("full", "freekv", *(f"method {i}" for i in range(10)))
    ]
    texts, notes = picture_of(profile_of(*cases, replace(FAILED, context=4096)))
    assert {"context, tokens", "1K", "4K", "step, ms", "batch 1", "batch 2", "full", "method 9"} <= set(texts)
    assert notes == ["a.svg does not show quest · 4K · batch 1, of which it has no time"]


def test_no_picture_is_drawn_where_nothing_was_measured():
    assert figure(profile_of(FAILED), Path("a.svg")) is None
