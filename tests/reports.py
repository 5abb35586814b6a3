"""Made-up reports for the tests of what shows them."""

from dataclasses import replace

from kvcli.bench.report import Breakdown, Case, Counts, PhaseTime, ProfileReport, Spread
from kvcli.telemetry.report import (
    Cache,
    CorrectionCounts,
    HeadCounts,
    KVOrigin,
    LayerCacheCounts,
    Memory,
    Report,
    Sequence,
    Step,
    Timing,
)

SETTINGS = {"budget": 256, "sink": 32, "window": 64, "page_size": 16, "dense_layers": 1, "tau": 0.9}
MIB = 2**20


def retrieving_sequence(source: str = "notes.txt", steps: int = 9, sample: int = 0, reason: str = "length") -> Sequence:
    """A sequence that retrieved: step i corrects i % 3 of 6 heads and misses 2 i of 40 pages."""
    return Sequence(
        source,
        sample,
        "A few words.",
        list(range(steps + 1)),
        reason,
        prompt_tokens=3912,
        output_tokens=steps + 1,
        timing=Timing.of(1240.0, 1262.5, [20.0 + i for i in range(steps)]),
        correction=CorrectionCounts(340, 12, 170, 9, 2),
        cache=Cache(
            11000,
            10201,
            799,
            bytes_to_device=12 * MIB,
            bytes_to_host=3 * MIB,
            prefill_bytes_to_host=3 * MIB - 36 * 1024,
            layers=[LayerCacheCounts(1, 11000, 10201, 799, 340, 12, 12 * MIB)],
        ),
        steps=[Step(i, 20.0 + i, 6, i % 3, 40, 2 * i, 2 * i * 4096, i * 1024) for i in range(steps)],
        kv=KVOrigin(read_tokens=3912),
    )


def dense_sequence(source: str = "notes.txt", steps: int = 5) -> Sequence:
    """A sequence for which nothing was selected, corrected or moved."""
    timing = Timing.of(80.0, 90.0, [4.0] * steps)
    moves = [Step(i, 4.0, 0, 0, 0, 0, 0, 0) for i in range(steps)]
    origin = KVOrigin(read_tokens=100)
    return Sequence(source, 0, "Words.", [1] * (steps + 1), "eos", 100, steps + 1, timing, steps=moves, kv=origin)


def report_of(*sequences: Sequence, method: str = "freekv") -> Report:
    """A report of `sequences` by a paged method, or by `full`, which has no settings."""
    profile = {"name": method, "method": method, "description": "", "paper": "", "hash": "0123456789ab"}
    profile["settings"] = SETTINGS if method == "freekv" else {}
    memory = Memory(host_kv_bytes=12 * MIB, device_kv_bytes=MIB, process_peak_bytes=812 * MIB)
    return Report({"kvcli": "0.1.0"}, {"name": "demo"}, profile, list(sequences), memory)


PHASES = ("projections", "attention", "mlp", "score", "select", "recall", "correction", "offload", "sampling", "host")


def case(label="full", context=1024, batch=1, ms=2.0, offloaded=False, hidden=0.0):
    """A row of it; `offloaded` KV is corrected, missed and recalled, `hidden` is the ms of recall that overlap."""
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


def profile_of(*cases, **options):
    """A report of `kvcli profile`."""
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
