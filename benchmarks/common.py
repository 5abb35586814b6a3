"""What every benchmark shares: its command line, what it ran on, how figures are summarised and where they are kept."""

import argparse
import json
import os
import statistics
import subprocess
from collections.abc import Callable
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


def ratios(above: list[float], below: list[float]) -> dict[str, float]:
    """Spread of the ratios, each taken within one round."""
    return spread([one / other for one, other in zip(above, below, strict=True)])


def said(found: dict[str, float], digits: int = 2) -> str:
    """Write a spread: the median, and in brackets least and most."""
    return f"{found['median']:.{digits}f}x ({found['min']:.{digits}f} to {found['max']:.{digits}f})"


def arguments(doc: str | None, name: str | None = None) -> argparse.ArgumentParser:
    """Make the parser of a program, which `doc` describes; with a name, `-o FILE` is by default the committed file."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if name is not None:
        _add_output(parser, name)
    return parser


def add_command(commands: Any, work: Callable[[argparse.Namespace], None], name: str) -> argparse.ArgumentParser:
    """Add a command that runs `work`, called as it is, with `-o FILE` as in `arguments`."""
    parser: argparse.ArgumentParser = commands.add_parser(work.__name__, help=work.__doc__, description=work.__doc__)
    parser.set_defaults(work=work)
    _add_output(parser, name)
    return parser


def _add_output(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / f"{name}.json", help="JSON file to write")


def save(path: Path, results: dict[str, Any]) -> None:
    """Write results with their provenance."""
    write(path, results, provenance())
    print(f"written to {path}")


def write(path: Path, results: dict[str, Any], origin: dict[str, Any]) -> None:
    """Write results that come from what `provenance` has said; a file that is there is whole at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.part")
    beside.write_text(json.dumps({"provenance": origin, **results}, indent=1) + "\n")
    beside.replace(path)


def put_between_marks(text: str, part: str, name: str) -> str:
    """Return `text` with `part` between the marks of this name.

    Raises:
        ValueError: the marks are missing.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    if begin not in text or end not in text:
        raise ValueError(f"the marks {begin.strip()} and {end.strip()} are missing")
    return text.partition(begin)[0] + begin + part + end + text.partition(end)[2]
