"""Spans and the trace file they make."""

import json
import threading

from kvcli.telemetry.timeline import Span, Timeline, chrome_trace


def test_nothing_is_kept_when_off():
    timeline = Timeline()
    with timeline.span("step"):
        pass
    assert timeline.spans == []


def test_spans_know_their_name_track_extent_and_details():
    timeline = Timeline(enabled=True)
    with timeline.span("step", index=3), timeline.span("recall", "sequence 0"):
        pass
    inner, outer = timeline.spans
    assert (inner.name, inner.track, outer.name, outer.track) == ("recall", "sequence 0", "step", "run")
    assert outer.start <= inner.start <= inner.end <= outer.end
    assert outer.details == {"index": 3}
    assert inner.lane == outer.lane


def test_another_thread_is_another_lane():
    timeline = Timeline(enabled=True)

    def work():
        with timeline.span("recall", "recall"):
            pass

    with timeline.span("step"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len({span.lane for span in timeline.spans}) == 2


def test_a_span_that_fails_is_kept():
    timeline = Timeline(enabled=True)
    try:
        with timeline.span("step"):
            raise ValueError
    except ValueError:
        pass
    assert [span.name for span in timeline.spans] == ["step"]


def test_groups_are_processes_and_tracks_their_lines():
    spans = [Span("step", "run", 0, 10), Span("recall", "sequence 0", 2, 5, details={"layer": 1})]
    events = json.loads(chrome_trace({"full": spans[:1], "freekv": spans}))["traceEvents"]
    named = [(event["pid"], event["args"]["name"]) for event in events if event["ph"] == "M"]
    assert named == [(0, "full"), (0, "run"), (1, "freekv"), (1, "run"), (1, "sequence 0")]
    drawn = [event for event in events if event["ph"] == "X"]
    assert drawn[-1] == {"ph": "X", "name": "recall", "pid": 1, "tid": 1, "ts": 2, "dur": 3, "args": {"layer": 1}}
    assert "args" not in drawn[0]


def test_lanes_of_a_track_are_lines_of_their_own():
    spans = [Span("step", "run", 0, 10, lane=7), Span("recall", "run", 2, 5, lane=9), Span("mlp", "run", 6, 8, lane=7)]
    events = json.loads(chrome_trace({"offload": spans}))["traceEvents"]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"][1:] == ["run, lane 7", "run, lane 9"]
    assert [event["tid"] for event in events if event["ph"] == "X"] == [0, 1, 0]


def test_a_timeline_saves_its_own(tmp_path):
    timeline = Timeline(enabled=True)
    with timeline.span("load"):
        pass
    timeline.save(tmp_path / "trace.json")
    names = [event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]]
    assert names == ["process_name", "thread_name", "load"]
