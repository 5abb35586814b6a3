"""Made-up reports for the tests of what shows them."""

from kvcli.telemetry.report import Cache, CorrectionCounts, LayerCacheCounts, Memory, Report, Sequence, Step, Timing

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
    )


def dense_sequence(source: str = "notes.txt", steps: int = 5) -> Sequence:
    """A sequence for which nothing was selected, corrected or moved."""
    timing = Timing.of(80.0, 90.0, [4.0] * steps)
    moves = [Step(i, 4.0, 0, 0, 0, 0, 0, 0) for i in range(steps)]
    return Sequence(source, 0, "Words.", [1] * (steps + 1), "eos", 100, steps + 1, timing, steps=moves)


def report_of(*sequences: Sequence, method: str = "freekv") -> Report:
    """A report of `sequences` by a paged method, or by `full`, which has no settings."""
    profile = {"name": method, "method": method, "description": "", "paper": "", "hash": "0123456789ab"}
    profile["settings"] = SETTINGS if method == "freekv" else {}
    memory = Memory(host_kv_bytes=12 * MIB, device_kv_bytes=MIB, process_peak_bytes=812 * MIB)
    return Report({"kvcli": "0.1.0"}, {"name": "demo"}, profile, list(sequences), memory)
