"""The report of quality against budget, on a tiny checkpoint: what it writes, and that it goes on."""

import json
import sys
from pathlib import Path

import pytest
from families import tiny_checkpoint

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import report


@pytest.mark.exhaustive
def test_a_report_has_figures_page_and_documents_and_goes_on(tmp_path, capsys):
    model = tiny_checkpoint("llama", tmp_path / "model")
    results, answers = tmp_path / "results.md", tmp_path / "answers.md"
    results.write_text("# Results\n\n<!-- overview -->\nold\n<!-- end of overview -->\nmore\n")
    answers.write_text("<!-- answers -->\n<!-- end of answers -->\n")
    options = ["-m", str(model), "--tasks", "niah_direct,counting", "--methods", "full,quest", "--lengths", "300,400"]
    options += ["--budgets", "96,128", "--rows", "2,1", "--folder", str(tmp_path / "out")]
    report.main([*options, "--document", str(results), "--document", str(answers)])
    written = results.read_text()
    assert written.startswith("# Results\n\n<!-- overview -->\n|  | 300, 96 | 300, 128 | 400, 96 | 400, 128 |\n")
    assert written.endswith("<!-- end of overview -->\nmore\n")
    rows = [line.split(" | ") for line in written.splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows] == ["| `full`", "| `quest`"]
    assert all(len(row) == 5 and "-" not in row for row in rows)

    written = answers.read_text()
    assert "300 tokens, 2 documents a task:" in written
    assert "400 tokens, 1 document a task:" in written
    rows = [line.split(" | ") for line in written.splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows] == 2 * ["| `full`", "| `quest 96`", "| `quest 128`"]
    assert all(len(row) == 7 for row in rows)
    body = json.loads((tmp_path / "out" / "answers.json").read_text())
    assert body["lengths"]["300"]["quest 96"]["documents"] == 2
    assert set(body["lengths"]["400"]["full"]["scores"]) == {"niah_direct", "counting"}
    assert "Score against cost" in (tmp_path / "out" / "answers.html").read_text()

    kept = {path: path.read_text() for path in (tmp_path / "out").glob("*.jsonl")}
    assert len(kept) == 2
    answers.write_text("<!-- long-answers -->\n<!-- end of long-answers -->\n")
    report.main([*options, "--document", str(answers), "--prefix", "long-"])
    assert "300 tokens, 2 documents a task:" in answers.read_text()
    assert all(path.read_text() == text for path, text in kept.items())  # nothing was asked again
    assert "quest 96" in capsys.readouterr().out


def test_rows_that_do_not_match_the_lengths_are_refused(tmp_path):
    with pytest.raises(SystemExit, match="one for each of --lengths 300,400,500"):
        report.main(["--lengths", "300,400,500", "--rows", "2,1", "--folder", str(tmp_path / "out")])


@pytest.mark.parametrize("text", ["# Results\n", "<!-- answers -->\n"])
def test_a_document_without_marks_is_refused_before_the_work(tmp_path, text):
    document = tmp_path / "results.md"
    document.write_text(text)
    with pytest.raises(ValueError, match="marks"):
        report.main(["--document", str(document), "--folder", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
