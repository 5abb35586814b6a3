"""A batch in words: what its summary and its status say."""

from __future__ import annotations

from collections.abc import Iterator

from kvcli.telemetry.progress import Progress
from kvcli.ui.summary import duration


def progress_rows(found: Progress) -> Iterator[tuple[str, str]]:
    """Label and value, line by line; what there is nothing of is left out."""
    earlier = f", {found.earlier:,} of them before" if found.earlier else ""
    yield "rows", f"{found.ended:,} of {found.total:,} have a result{earlier}"
    if failed := found.failed + found.earlier_failed:
        yield "failed", f"{failed:,}; --retry-errors does them again"
    if found.in_flight:
        yield "in flight", f"{found.in_flight:,}"
    if found.prompt_tokens:
        shared = f" and {found.shared_tokens:,} shared" if found.shared_tokens else ""
        yield "prompts", f"{found.prompt_tokens:,} tokens read{shared}"
    if found.output_tokens:
        rows = f", {found.output_tokens / found.steps:.1f} rows a step" if found.steps else ""
        yield "output", f"{found.output_tokens:,} tokens, {found.output_tokens_per_second:,.1f} a second{rows}"
    if found.seconds and found.output_tokens:
        yield "time", f"{duration(1000 * found.seconds)}, {shares(found)}"
    if found.left_seconds and found.in_flight:
        yield "left", f"about {duration(1000 * found.left_seconds)}"


def shares(found: Progress) -> str:
    """How the time was divided."""
    whole = found.seconds or 1.0
    return f"prefill {found.prefill_seconds / whole:.0%}, decode {found.decode_seconds / whole:.0%}"
