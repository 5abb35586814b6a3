"""What every benchmark shares: what it ran on, how figures are summarised, and where they are kept."""

import argparse
import json
import os
import statistics
import subprocess
from pathlib import Path
from typing import Any

import torch

from kvcli.telemetry import report

RESULTS = Path(__file__).parent / "results"


def provenance(commit: str | None = None) -> dict[str, Any]:
    """Hardware, versions and commit; `commit` is said where git cannot tell, and None where it is not known."""
    root = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    changes = git("status", "--porcelain", "--untracked-files=no")

    return {
        **report.environment(),
        "cpu": report.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "commit": commit or git("rev-parse", "--short=12", "HEAD"),
        "modified": None if changes is None else bool(changes),
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def add_output(parser: argparse.ArgumentParser, name: str) -> None:
    """Add `-o FILE`, by default the committed results file."""
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / f"{name}.json", help="JSON file to write")


def save(path: Path, results: dict[str, Any]) -> None:
    """Write results with their provenance."""
    write(path, results, provenance())
    print(f"written to {path}")


def write(path: Path, results: dict[str, Any], origin: dict[str, Any]) -> None:
    """Write results that come from what `provenance` has said."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"provenance": origin, **results}, indent=1) + "\n")
