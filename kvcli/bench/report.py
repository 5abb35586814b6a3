"""A profile as data, and its JSON form. Times are milliseconds on the host's clock, sizes bytes, counts exact.

The names are a contract with readers of `--json`: fields may be added, but not renamed.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvcli.capacity.roofline import Work
from kvcli.telemetry.report import HeadCounts

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Spread:
    """Several runs of one case: their median, the least and the most."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class PhaseTime:
    """One phase of a step: `ms` is the time that the step waits for it, `hidden_ms` the time overlapped with others.

    `floor_ms` is the roofline of `work`, its bytes and operations.
    """

    phase: str
    ms: float
    hidden_ms: float = 0.0
    floor_ms: float | None = None
    work: Work | None = None


@dataclass(frozen=True)
class Breakdown:
    """The phases of a step: means over `steps` steps of separate runs, the half around the median.

    `parts` add up to `step_ms`, which the decode loop measures; the host's part is what the clocks inside leave of it.
    `disturbance` is the median step with clocks inside over that of the run before without them: 1.05 is 5 % slower.
    """

    step_ms: float
    steps: int
    parts: list[PhaseTime]
    disturbance: Spread


@dataclass(frozen=True)
class Counts:
    """What the timed steps of a run checked, selected and moved, over all sequences: [steps][layers].

    `bytes_exposed` is the part of `bytes_to_device` that attention waited for. `by_head` has the sums over the steps by
    KV head, [layers]; None for a layer that requested nothing.

    With a disk below host memory, of the pages that were fetched `host_hits` lay in host memory and `disk_reads` did
    not (tokens, where layers are brought whole). `bytes_from_disk` were read, `bytes_to_disk` written, and the run did
    nothing but wait for the disk for `disk_wait_ms`.
    """

    heads_checked: list[list[int]]
    heads_corrected: list[list[int]]
    pages_requested: list[list[int]]
    misses: list[list[int]]
    bytes_to_device: list[list[int]]
    bytes_exposed: list[list[int]]
    by_head: list[HeadCounts | None]
    host_hits: list[list[int]] = field(default_factory=list)
    disk_reads: list[list[int]] = field(default_factory=list)
    bytes_from_disk: list[list[int]] = field(default_factory=list)
    bytes_to_disk: list[list[int]] = field(default_factory=list)
    disk_wait_ms: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True)
class Case:
    """One method or peer at one context in tokens and batch size.

    `pipeline` is what ran its steps, "graph", "piecewise" or "blocking" (see `kvcli.methods.card.gpu_step_of`), or
    "launched" where a graph or pieces were to be and could not be captured, of which `notices` say why; None for peers.
    `runs_ms` has the median step of each run, `ratio` the step time of the first case over this one's, `floor_ms` the
    roofline, `equivalent_bandwidth` in bytes a second what full attention would have to read at to be as fast. Of KV on
    a disk, `host_kv_bytes` is the cache. `prefill_ms` is the time in which the prompt was read, where it was: methods
    that read exactly do it together, windows are read for each. A case that could not run has the reason in `error` and
    no figures.
    """

    label: str
    kind: str  # "method", "ablation" or "peer"
    context: int
    batch: int
    profile: dict[str, Any] | None = None
    pipeline: str | None = None
    runs_ms: list[float] = field(default_factory=list)
    step_ms: Spread | None = None
    tokens_per_s: float | None = None
    ratio: Spread | None = None
    floor_ms: float | None = None
    equivalent_bandwidth: float | None = None
    breakdown: Breakdown | None = None
    counts: Counts | None = None
    device_kv_bytes: int | None = None
    host_kv_bytes: int | None = None
    prefill_ms: float | None = None
    disk_kv_bytes: int | None = None
    error: str | None = None
    notices: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ProfileReport:
    """All results of `kvcli profile`; `finished` is False after Ctrl-C.

    `options` has what was asked for, among it `kv`, "made up" or "read"; `ceilings` has the rates of the machine.
    """

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
