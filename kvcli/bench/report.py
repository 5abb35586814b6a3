"""A profile as data, and its JSON form. Times are milliseconds on the host clock, sizes bytes, counts exact.

The names are a contract with readers of `--json`: add to them, never rename.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvcli.capacity.floors import Work
from kvcli.telemetry.report import HeadCounts

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Spread:
    """Several runs of the same: their median, the least and the most."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Part:
    """One phase of a step: the time that the step waits for it (`ms`), and beside it what is hidden behind others.

    `floor_ms` is what the machine's rates allow for `work`, the bytes and operations that it has to move and make.
    """

    phase: str
    ms: float
    hidden_ms: float = 0.0
    floor_ms: float | None = None
    work: Work | None = None


@dataclass(frozen=True)
class Breakdown:
    """Means over `steps` steps of runs of their own, the half around the median; `parts` add up to `step_ms`.

    `step_ms` is taken by the loop's clock, `parts` by those inside; the host's is what is left. `disturbance` is the
    median step with clocks inside over that of the run before, without them: 1.05 is 5 % slower.
    """

    step_ms: float
    steps: int
    parts: list[Part]
    disturbance: Spread


@dataclass(frozen=True)
class Counts:
    """What was checked, selected and moved in a run's timed steps, all sequences together: [steps][layers].

    `bytes_exposed` is the part of `bytes_to_device` that attention waited for. `by_head` has the sums of these steps
    for each KV head, [layers]; None where a layer asked for nothing.
    """

    heads_checked: list[list[int]]
    heads_corrected: list[list[int]]
    pages_requested: list[list[int]]
    misses: list[list[int]]
    bytes_to_device: list[list[int]]
    bytes_exposed: list[list[int]]
    by_head: list[HeadCounts | None]


@dataclass(frozen=True)
class Case:
    """One method or peer at one context and batch size. `ratio` is the first case's step time over this one's.

    `runs_ms` has the median step of each run. A case that could not run says why in `error` and has nothing else.
    """

    label: str
    kind: str  # "method", "ablation" or "peer"
    context: int
    batch: int
    profile: dict[str, Any] | None = None
    runs_ms: list[float] = field(default_factory=list)
    step_ms: Spread | None = None
    tokens_per_s: float | None = None
    ratio: Spread | None = None
    floor_ms: float | None = None
    breakdown: Breakdown | None = None
    counts: Counts | None = None
    device_kv_bytes: int | None = None
    host_kv_bytes: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class ProfileReport:
    """Everything that `kvcli profile` found out. `kv` is "made up" or "read"; `finished` is False after Ctrl-C."""

    environment: dict[str, Any]
    model: dict[str, Any]
    options: dict[str, Any]
    ceilings: dict[str, Any]
    cases: list[Case]
    finished: bool = True
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        """Serialise as one JSON object; `schema_version` first."""
        body = asdict(self)
        return json.dumps({"schema_version": body.pop("schema_version"), **body}, ensure_ascii=False)
