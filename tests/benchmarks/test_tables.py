"""The tables of `benchmarks/README.md` are those of the files in `benchmarks/results/`."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import tables  # noqa: E402


def test_every_row_stands_in_the_readme(capsys):
    tables.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    written = (BENCHMARKS / "README.md").read_text().splitlines()
    assert len(rows) > 100
    assert not [row for row in rows if row not in written]
