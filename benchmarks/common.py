"""What every benchmark shares: what it ran on, how figures are summarised, and where they are kept."""

import argparse
import json
import os
import statistics
import subprocess
from pathlib import Path
from typing import Any

import torch

from kvcli import report

RESULTS = Path(__file__).parent / "results"


def provenance() -> dict[str, Any]:
    """Hardware, versions and commit."""
    root = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False).stdout.strip()

    return {
        **report.environment(),
        "cpu": report.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "commit": git("rev-parse", "--short=12", "HEAD"),
        "modified": bool(git("status", "--porcelain", "--untracked-files=no")),
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def add_output(parser: argparse.ArgumentParser, name: str) -> None:
    """Add `-o FILE`, by default the committed results file."""
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / f"{name}.json", help="JSON file to write")


def save(path: Path, results: dict[str, Any]) -> None:
    """Write results with their provenance."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"provenance": provenance(), **results}, indent=1) + "\n")
    print(f"written to {path}")
