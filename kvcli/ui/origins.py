"""Where the KV of prompts came from, what was saved of it, and where the layers lay, in words."""

from __future__ import annotations

from collections.abc import Callable

from kvcli.sizes import format_bytes
from kvcli.telemetry.report import Report


def origin_rows(report: Report, duration: Callable[[float], str]) -> list[tuple[str, str]]:
    """What was read, shared and loaded of all prompts, and what was saved; `duration` words milliseconds.

    Nothing where every prompt was read, and nothing saved.
    """
    origins = [sequence.kv for sequence in report.sequences]
    loaded, shared = (sum(getattr(kv, name) for kv in origins) for name in ("disk_tokens", "shared_tokens"))
    rows = []
    if loaded or shared:
        parts = [f"{sum(kv.read_tokens for kv in origins if kv.read_tokens):,} tokens read"]
        if shared:
            held = sum(kv.shared_bytes for kv in origins)
            parts.append(f"{shared:,} shared" + (f" ({format_bytes(held)} of host memory)" if held else ""))
        if loaded:
            size, ms = sum(kv.disk_bytes for kv in origins), sum(kv.disk_ms for kv in origins)
            parts.append(f"{loaded:,} from disk ({_moved(size, ms, duration)})")
        rows.append(("prompts", " · ".join(parts)))
    for each in report.saved:
        if each.error is None:
            what = f"{each.tokens:,} tokens of {each.source}, {_moved(each.bytes, each.write_ms, duration)}"
            rows.append(("saved", f"{what}, beside the prefill"))
    return rows


def placement_rows(report: Report) -> list[tuple[str, str]]:
    """Which layers lay on which device, where they were several."""
    pieces = report.model.get("placement", ())
    said = [f"{piece['device']} {_layers(*piece['layers'])}" for piece in pieces]
    return [("layers", " · ".join(said))] if said else []


def _layers(first: int, last: int) -> str:
    return "none" if last < first else f"{first}" if last == first else f"{first}-{last}"


def _moved(size: int, ms: float, duration: Callable[[float], str]) -> str:
    rate = f", {format_bytes(1000 * size / ms)}/s" if ms else ""
    return f"{format_bytes(size)} in {duration(ms)}{rate}"
