"""A reduced form of the benchmark: a kill at a random moment, greedy and sampled, loses nothing that was kept."""

import json
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "kill_resume.py"


@pytest.mark.exhaustive  # tests/cli/test_generate.py kills one run
def test_killed_runs_end_as_if_nobody_had_killed_them(warm, tmp_path):
    output = tmp_path / "rows.json"
    done = warm("--method", "arkvale", "--kills", 1, "--tokens", 16, "-o", output, program=PROGRAM)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["same"] for row in json.loads(output.read_text())["rows"]] == [True, True]
