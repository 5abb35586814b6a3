"""Results as data: the outcome, times and traffic of a generation, and its JSON form.

The names are a contract with readers of `--json`: add to them, never rename. Times are milliseconds on the host clock,
sizes are bytes, counts are exact. Rates are not stored: a reader divides a count by the count next to it.
"""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, astuple, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Timing:
    """Wall times of one sequence; the first token's time is `ttft_ms` and not part of `decode_ms`.

    `compile_ms` is the time in which steps waited for loops to be compiled, which `decode_ms` leaves out.
    `ttft_from_start_ms` counts from the start of the command, None where no command was started for the sequence.
    """

    prefill_ms: float = 0.0
    ttft_ms: float = 0.0
    decode_ms: list[float] = field(default_factory=list)
    p50_ms: float | None = None
    p90_ms: float | None = None
    p99_ms: float | None = None
    tokens_per_s: float | None = None
    compile_ms: float = 0.0
    ttft_from_start_ms: float | None = None

    @classmethod
    def of(
        cls,
        prefill_ms: float,
        ttft_ms: float,
        decode_ms: list[float],
        compile_ms: float = 0.0,
        from_start_ms: float | None = None,
    ) -> Timing:
        """Summarise step times; percentiles are None without a decode step."""
        total = sum(decode_ms)
        rate = 1000 * len(decode_ms) / total if total else None
        p50, p90, p99 = (percentile(decode_ms, q) for q in (50, 90, 99))
        return cls(prefill_ms, ttft_ms, decode_ms, p50, p90, p99, rate, compile_ms, from_start_ms)


@dataclass(frozen=True)
class CorrectionCounts:
    """How often speculation had to be corrected; counts only steps where retrieval was active."""

    heads_checked: int = 0
    heads_corrected: int = 0
    layer_steps_checked: int = 0
    layer_steps_corrected: int = 0
    first_retrievals: int = 0


@dataclass(frozen=True)
class HeadCounts:
    """Counts for each KV head of a layer: [Hk] each."""

    pages_requested: list[int]
    misses: list[int]
    heads_checked: list[int]
    heads_corrected: list[int]


@dataclass(frozen=True)
class LayerCacheCounts:
    """Requests and traffic of one layer over the whole decode; `by_head` is None if it requested nothing."""

    layer: int
    pages_requested: int
    hits: int
    misses: int
    heads_checked: int
    heads_corrected: int
    bytes_to_device: int
    by_head: HeadCounts | None = None
    host_hits: int = 0
    disk_reads: int = 0
    bytes_from_disk: int = 0


@dataclass(frozen=True)
class Cache:
    """Hits and misses of the selected pages (one page of one KV head counts one), and bus traffic.

    `bytes_exposed` is the part of `bytes_to_device` that attention waited for; the rest came after it, for later steps.
    `bytes_to_host` is all that was written out, `prefill_bytes_to_host` the prompt's part of it.

    With a disk below host memory, `host_hits` of the fetched pages were in host memory and `disk_reads` were not
    (tokens, for layers that are fetched whole). `bytes_from_disk` were read, `bytes_to_disk` written. The run did
    nothing but wait for the disk for `disk_wait_ms` of its steps and `prefill_disk_wait_ms` of its prefill.
    """

    pages_requested: int = 0
    hits: int = 0
    misses: int = 0
    bytes_to_device: int = 0
    bytes_to_host: int = 0
    prefill_bytes_to_host: int = 0
    layers: list[LayerCacheCounts] = field(default_factory=list)
    bytes_exposed: int = 0
    host_hits: int = 0
    disk_reads: int = 0
    bytes_from_disk: int = 0
    bytes_to_disk: int = 0
    prefill_bytes_to_disk: int = 0
    disk_wait_ms: float = 0.0
    prefill_disk_wait_ms: float = 0.0


@dataclass(frozen=True)
class Step:
    """One decode step of one sequence, summed over its layers."""

    step: int
    ms: float
    heads_checked: int
    heads_corrected: int
    pages_requested: int
    misses: int
    bytes_to_device: int
    bytes_to_host: int
    host_hits: int = 0
    disk_reads: int = 0
    bytes_from_disk: int = 0


@dataclass(frozen=True)
class DraftCounts:
    """How full attention agreed with a method's drafts: its passes, the tokens drafted and those accepted.

    A pass gives one token more than it accepts.
    """

    passes: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class KVOrigin:
    """The origin of the KV of a prompt's tokens; the three counts of tokens add up to the prompt.

    `read_tokens` went through the model for this sequence. `shared_tokens` belong to an earlier sequence on the same
    document, and both share `shared_bytes` of host memory. `disk_tokens` were saved before: `disk_bytes` were read for
    them in `disk_ms`.
    """

    read_tokens: int = 0
    shared_tokens: int = 0
    disk_tokens: int = 0
    shared_bytes: int = 0
    disk_bytes: int = 0
    disk_ms: float = 0.0


@dataclass(frozen=True)
class Sequence:
    """One prompt's outcome. `finish_reason`: eos, stop, length, interrupted or error (then `error` says why).

    `question` is the prompt's question and `id` its name, if any; `kv` is the origin of the prompt's KV. `budget` is
    the method's budget in tokens, resolved if it was a share of the prompt, and `sink` and `window` are what it has of
    these, which shrink with such a budget; each is None if the method has no such setting. Questions
    on one document are read together: the first one's `prefill_ms` covers all, that of the others is 0.

    `method` holds what only the method knows, see `Method.statistics`; `fidelity` says how close an audited run came to
    full attention, see `kvcli.quality.fidelity`. `drafts` counts what full attention checked, None if it did not.
    Where a model reasons before it answers, `text` has both parts, `thoughts` and `answer` one each; otherwise both are
    None.
    """

    source: str
    sample: int
    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    output_tokens: int
    timing: Timing = field(default_factory=Timing)
    correction: CorrectionCounts = field(default_factory=CorrectionCounts)
    cache: Cache = field(default_factory=Cache)
    steps: list[Step] = field(default_factory=list)
    method: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    fidelity: dict[str, Any] = field(default_factory=dict)
    question: str | None = None
    id: str | None = None
    kv: KVOrigin = field(default_factory=KVOrigin)
    budget: int | None = None
    sink: int | None = None
    window: int | None = None
    drafts: DraftCounts | None = None
    thoughts: str | None = None
    answer: str | None = None


@dataclass(frozen=True)
class SavedPrompt:
    """A prompt's KV that the run saved: its path, tokens and bytes, and the time of writing, in parallel with the run.

    `cached` is true in a store, false in a directory that was named. `error` says why saving failed; `path` is None
    then.
    """

    source: str
    path: str | None
    tokens: int
    bytes: int
    write_ms: float
    cached: bool
    error: str | None = None


@dataclass(frozen=True)
class Memory:
    """Bytes by tier. On a CPU both tiers are host memory and nothing is pinned.

    `device_kv_bytes` is what the method keeps on the device for all sequences at the end of the run, `host_kv_bytes`
    what lies in the host tier, where memory shared by sequences counts once. `disk_kv_bytes` lies in files, which host
    memory caches.
    """

    device_peak_bytes: int | None = None
    host_pinned_bytes: int = 0
    device_kv_bytes: int = 0
    host_kv_bytes: int = 0
    process_peak_bytes: int = 0
    disk_kv_bytes: int = 0


@dataclass(frozen=True)
class WeightTraffic:
    """Streamed weights that were loaded: bytes, and waits for them, of the prefill and of all `steps`.

    In steps, routers chose experts `experts_asked` times, each once a layer and step; `experts_cached` times one was in
    memory. On a GPU the device waits, which no clock of the host sees.
    """

    prefill_bytes: int
    prefill_wait_ms: float
    decode_bytes: int
    decode_wait_ms: float
    steps: int
    experts_asked: int = 0
    experts_cached: int = 0

    def plus(self, other: WeightTraffic) -> WeightTraffic:
        """Add up."""
        return WeightTraffic(*map(sum, zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Report:
    """The results of a run of `kvcli generate`."""

    environment: dict[str, Any]
    model: dict[str, Any]
    profile: dict[str, Any]
    sequences: list[Sequence]
    memory: Memory
    schema_version: int = SCHEMA_VERSION
    saved: list[SavedPrompt] = field(default_factory=list)
    streamed_weights: WeightTraffic | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; keys in declaration order, `schema_version` first."""
        body = asdict(self)
        return {"schema_version": body.pop("schema_version"), **body}

    def to_json(self) -> str:
        """Serialise `to_dict` as one JSON object."""
        return json.dumps(self.to_dict(), ensure_ascii=False)


def percentile(values: list[float], q: float) -> float | None:
    """Return percentile `q` in [0, 100] with linear interpolation between ranks; None for no values."""
    import numpy as np

    return float(np.percentile(values, q)) if values else None


def environment() -> dict[str, Any]:
    """Return the versions and the machine that a result depends on."""

    def installed(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    packages = ("kvcli", "torch", "transformers", "triton")
    return {
        **{package: installed(package) for package in packages},
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def processor() -> str:
    """Return the CPU's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
