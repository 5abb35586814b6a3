"""A reduced form of the benchmark: a few kills, late in saving and storing, leave nothing half-made."""

import json
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "kill_saved.py"


@pytest.mark.exhaustive
def test_killed_runs_leave_what_is_whole_or_nothing(warm, tmp_path):
    output = tmp_path / "seen.json"
    done = warm("--kills", 6, "-o", output, program=PROGRAM)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(output.read_text())
    fallen = [kills for phases in seen["histogram"].values() for kills in phases.values()]
    assert sum(fallen) == seen["kills"] >= 6
    assert sum(seen["histogram"]["save"].get(late, 0) for late in ("directory's name", "end")) > 0
