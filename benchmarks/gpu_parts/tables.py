"""What was found, as tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpu_parts.frame import Row


def show(results: Mapping[str, Any], targets: Sequence[Row]) -> None:
    """Print what is wanted beside what was measured, what is right, and how each part ended."""
    print("\ntargets")
    for target in targets:
        print("  " + target_line(target))
    for part in ("kernels", "agreement"):
        rows = results.get(part, {"rows": []})["rows"]
        on_cpu = (
            " (on a CPU, where references stand in for kernels)" if rows and rows[0].get("ran") != "kernels" else ""
        )
        if rows:
            print(f"{part}: {sum(row['agrees'] for row in rows)} of {len(rows)} agree{on_cpu}")
    print("parts")
    for name, part in results.items():
        seconds = f", {part['seconds']:.0f} s" if "seconds" in part else ""
        error = f": {part['error']}" if part["error"] else ""
        print(f"  {name:<14} {part['state']}{seconds}{error}")


def target_line(target: Row) -> str:
    """One line: figure with its spread, what is wanted, and whether it is met."""
    if target["measured"] is None:
        return f"{target['what']:<62} not measured ({target['missing']})"
    figure = f"{target['measured']:.2f} {target['unit']}"
    spread = "" if target["least"] is None else f" ({target['least']:.2f} to {target['most']:.2f})"
    verdict = {True: ": met", False: ": NOT met", None: ""}[target["met"]]
    wanted = "" if target["wanted"] is None else f"wanted {target['wanted']}{verdict}"
    return f"{target['what']:<62} {figure:>10}{spread:<20} {wanted}".rstrip()
