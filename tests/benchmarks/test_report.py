"""The report of quality against budget, on a tiny checkpoint: what it writes, and that it goes on."""

import json
import sys
from pathlib import Path

import pytest
from families import tiny_checkpoint

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import report


def test_a_report_has_table_page_and_document_and_goes_on(tmp_path, capsys):
    model = tiny_checkpoint("llama", tmp_path / "model")
    document = tmp_path / "results.md"
    document.write_text("# Results\n\n<!-- answers -->\nold\n<!-- end of answers -->\nmore\n")
    options = ["-m", str(model), "--tasks", "niah_direct,counting", "--methods", "full,quest", "--lengths", "300"]
    options += ["--budgets", "96,128", "--rows", "2", "--folder", str(tmp_path / "out"), "--document", str(document)]
    report.main(options)
    written = document.read_text()
    assert written.startswith("# Results\n\n<!-- answers -->\n300 tokens, 2 documents a task:")
    assert written.endswith("<!-- end of answers -->\nmore\n")
    rows = [line.split(" | ") for line in written.splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows] == ["| `full`", "| `quest 96`", "| `quest 128`"]
    assert all(len(row) == 7 for row in rows)
    body = json.loads((tmp_path / "out" / "answers.json").read_text())
    assert len(body["results"]) == 6
    assert "Score against cost" in (tmp_path / "out" / "answers.html").read_text()

    answers = tmp_path / "out" / "answers.jsonl"
    kept = answers.read_text()
    report.main(options)
    assert answers.read_text() == kept  # nothing was asked again
    assert "quest 96" in capsys.readouterr().out


def test_a_document_without_marks_is_refused_before_the_work(tmp_path):
    document = tmp_path / "results.md"
    document.write_text("# Results\n")
    with pytest.raises(ValueError, match="marks"):
        report.main(["--document", str(document), "--folder", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
