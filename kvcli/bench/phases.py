"""From spans to the parts of a step.

Spans that lie within others count for themselves and no longer for those around them, so that the parts of a step are
disjoint and add up to it exactly. What no span claims is the host's: Python, launches, rotary and residual arithmetic.

Only one lane, that of the step itself, is what the step waits for. What runs on other lanes (threads, streams) is
overlapped: reported beside, as far as the step was not waiting for the very same phase.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from kvcli.capacity.roofline import PHASES
from kvcli.telemetry.timeline import Span

STEP = "step"
# A token is appended to what a method keeps, which is part of attending; with KV in host memory it is the offload.
_APPEND, _OFFLOAD = "append", "offload"
_PHASE_OF = {STEP: "host", _APPEND: "attention", "prune": "select", **{phase: phase for phase in PHASES}}


@dataclass(frozen=True)
class StepParts:
    """One step in microseconds: the disjoint parts that it waits for, by phase, and what runs hidden beside them."""

    exposed: dict[str, float]
    hidden: dict[str, float]


def known_spans() -> frozenset[str]:
    """Names of spans that belong to a phase."""
    return frozenset(_PHASE_OF)


def phase_of(name: str, offloaded: bool) -> str:
    """The phase of a span called `name`, of a method that keeps KV in host memory or not."""
    return _OFFLOAD if offloaded and name == _APPEND else _PHASE_OF.get(name, "host")


def step_parts(spans: Sequence[Span], offloaded: bool) -> list[StepParts]:
    """Take the steps among `spans` apart, in order; `offloaded` as in `phase_of`."""
    steps = sorted((span for span in spans if span.name == STEP), key=lambda span: span.start)
    return [_parts(step, spans, offloaded) for step in steps]


def _parts(step: Span, spans: Sequence[Span], offloaded: bool) -> StepParts:
    inside = [span for span in spans if span is not step and step.start <= span.start and span.end <= step.end]
    own = [span for span in inside if span.lane == step.lane]
    exposed: dict[str, float] = defaultdict(float)
    for name, time in exclusive(step, own).items():
        exposed[phase_of(name, offloaded)] += time
    waits: dict[str, list[Span]] = defaultdict(list)
    for span in own:
        waits[phase_of(span.name, offloaded)].append(span)
    hidden: dict[str, float] = defaultdict(float)
    for span in inside:
        if span.lane != step.lane:
            phase = phase_of(span.name, offloaded)
            hidden[phase] += span.end - span.start - sum(_overlap(span, wait) for wait in waits[phase])
    return StepParts(dict(exposed), dict(hidden))


def exclusive(outer: Span, inner: Sequence[Span]) -> dict[str, float]:
    """Time of each name within `outer`, without what lies deeper; `inner` is nested, in the order in which it ended."""
    time: dict[str, float] = defaultdict(float)
    at, around = outer.start, [outer]

    def close(until: float) -> None:
        nonlocal at
        while len(around) > 1 and around[-1].end <= until:
            span = around.pop()
            time[span.name] += span.end - at
            at = span.end

    nested = list(reversed(inner))  # of two with the same extent the outer one ended last
    nested.sort(key=lambda span: (span.start, -span.end))
    for span in nested:
        close(span.start)
        time[around[-1].name] += span.start - at
        at = span.start
        around.append(span)
    close(outer.end)
    time[outer.name] += outer.end - at
    return dict(time)


def _overlap(one: Span, other: Span) -> float:
    return max(0.0, min(one.end, other.end) - max(one.start, other.start))


def middle(steps: Sequence[tuple[float, StepParts]]) -> list[tuple[float, StepParts]]:
    """The half of the steps, each with its time, around the median: what another process disturbed is left out."""
    ordered = sorted(steps, key=lambda step: step[0])
    drop = len(ordered) // 4
    return ordered[drop : len(ordered) - drop]
