"""Spans to parts of a step."""

import re
from pathlib import Path

import pytest

import kvcli
from kvcli.bench.phases import exclusive, known_spans, middle, phase_of, step_parts
from kvcli.capacity.roofline import PHASES
from kvcli.telemetry.timeline import Span


def span(name, start, end, lane=0):
    return Span(name, "run", start, end, lane)


def ended(*spans):
    """In the order in which a timeline has them."""
    return sorted(spans, key=lambda s: (s.end, -s.start))


def test_every_span_that_methods_open_belongs_to_a_phase():
    found = set()
    for path in (Path(kvcli.__file__).parent / "methods").rglob("*.py"):
        found |= set(re.findall(r'(?:self|step)\.span\("(\w+)"', path.read_text()))
    assert {"score", "select", "attention", "append", "recall", "correction"} <= found <= known_spans()
    assert {phase_of(name, offloaded=False) for name in known_spans()} <= set(PHASES)


def test_parts_are_disjoint_and_add_up():
    step = span("step", 100, 200)
    inner = [span("attention", 110, 160), span("score", 120, 130), span("select", 130, 140), span("mlp", 160, 190)]
    (parts,) = step_parts(ended(step, *inner), offloaded=False)
    assert parts.exposed == {"host": 20, "attention": 30, "score": 10, "select": 10, "mlp": 30}
    assert sum(parts.exposed.values()) == step.end - step.start
    assert parts.hidden == {}


def test_spans_of_the_same_extent_nest_as_they_ended():
    outer, inner = span("attention", 0, 10), span("recall", 0, 10)
    assert exclusive(span("step", 0, 10), [inner, outer]) == {"step": 0, "attention": 0, "recall": 10}


def test_each_step_has_its_own():
    spans = ended(
        span("step", 0, 10), span("mlp", 2, 4), span("step", 20, 40), span("mlp", 25, 35), span("load", 50, 60)
    )
    first, second = step_parts(spans, offloaded=False)
    assert (first.exposed, second.exposed) == ({"host": 8, "mlp": 2}, {"host": 10, "mlp": 10})


def test_other_lanes_are_hidden_as_far_as_nobody_waits_for_them():
    step, wait = span("step", 0, 100), span("recall", 60, 80)
    (parts,) = step_parts(ended(step, span("attention", 10, 50), wait, span("recall", 20, 80, lane=1)), offloaded=True)
    assert parts.exposed == {"host": 40, "attention": 40, "recall": 20}
    assert parts.hidden == {"recall": 40}


@pytest.mark.parametrize(("offloaded", "phase"), [(False, "attention"), (True, "offload")])
def test_an_append_is_an_offload_where_kv_is_offloaded(offloaded, phase):
    (parts,) = step_parts([span("append", 1, 3), span("step", 0, 3)], offloaded)
    assert parts.exposed == {"host": 1, phase: 2}


def test_what_nobody_knows_is_the_hosts():
    (parts,) = step_parts([span("tea", 1, 3), span("step", 0, 3)], offloaded=False)
    assert parts.exposed == {"host": 3}


def test_the_middle_half_leaves_out_both_ends():
    (parts,) = step_parts([span("step", 0, 1)], offloaded=False)
    assert [ms for ms, _ in middle([(ms, parts) for ms in (9.0, 1.0, 3.0, 2.0, 4.0)])] == [2, 3, 4]
    assert len(middle([(1.0, parts)])) == 1
