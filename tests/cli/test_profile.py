"""`kvcli profile` as a command."""

import json
import time
from functools import partial

import pytest
from command import assert_refused
from families import tiny_checkpoint
from pictures import texts_of

from kvcli.bench.report import Case, ProfileReport
from kvcli.cli.profile import exit_code
from kvcli.errors import ExitCode

SMALL = ["--set", "budget=96", "--set", "sink=16", "--set", "window=32", "--set", "page_size=16"]
QUICK = ["--output-len", "3", "--repeat", "1", "--warmup", "1"]


@pytest.fixture(scope="module")
def profile(tmp_path_factory, warm):
    model = tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))
    return partial(warm, "profile", "-m", model)


@pytest.fixture(scope="module")
def written(profile, tmp_path_factory):
    """One run that writes everything."""
    directory = tmp_path_factory.mktemp("profile")
    files = {name: directory / name for name in ("out.json", "trace.json", "page.html", "times.svg")}
    arguments = ["--method", "full,freekv", *SMALL, "--context", "200,300", "--batch-size", "1,2", *QUICK]
    arguments += ["--ablate", "--peers", "--json", "-o", files["out.json"]]
    result = profile(
        *arguments, "--trace", files["trace.json"], "--html", files["page.html"], "--figure", files["times.svg"]
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    return {name: file.read_text() for name, file in files.items()}


def test_json_has_a_case_for_each(written):
    body = json.loads(written["out.json"])
    labels = {case["label"] for case in body["cases"]}
    assert {"full", "freekv", "freekv, no speculation", "transformers"} < labels
    assert len(labels) == 7  # the three other steps of the ablation
    assert {(case["context"], case["batch"]) for case in body["cases"]} == {(200, 1), (200, 2), (300, 1), (300, 2)}
    assert len(body["cases"]) == 4 * 7
    assert body["options"] | {"steps": 3, "repeat": 1, "warmup": 1} == body["options"]


def test_the_trace_has_a_process_for_each_case_and_a_line_for_each_track(written):
    events = json.loads(written["trace.json"])["traceEvents"]
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert "freekv · 300 tokens · batch 2" in processes
    assert len(processes) == 4 * 6  # a peer has none
    pid = processes.index("freekv · 300 tokens · batch 2")
    lines = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == pid]
    assert sorted(lines) == ["run", "sequence 0", "sequence 1"]
    assert {"step", "projections", "score", "recall"} <= {e["name"] for e in events if e["pid"] == pid}


def test_the_page_stands_alone(written):
    page = written["page.html"]
    assert page.startswith("<!DOCTYPE html>")
    for heading in ("Phases of a step", "Step time and context", "One step", "Corrections and recalls"):
        assert f"<h2>{heading}</h2>" in page
    assert "src=" not in page.partition("<script>")[0]
    assert page.count('type="application/vega-lite+json"') >= 6


def test_the_picture_has_the_methods(written):
    assert {"full", "freekv, no speculation", "transformers", "batch 2"} <= set(texts_of(written["times.svg"]))


def test_tables_and_notes_go_to_stdout(profile):
    result = profile("--method", "full,quest", *SMALL, "--context", "200", *QUICK)
    assert result.returncode == 0, result.stderr
    titles = [line for line in result.stdout.splitlines() if line.startswith(("step at", "phases"))]
    assert titles == ["step at 200 tokens, batch 1", "phases of a step at 200 tokens, batch 1, ms"]
    assert "speedup" in result.stdout
    assert "overhead" in result.stdout
    assert "seeded noise" in result.stdout
    assert result.stderr == ""


def test_a_document_is_read(profile, tmp_path):
    (tmp_path / "fox.txt").write_text("the quick brown fox jumps over the lazy dog " * 20)
    result = profile(tmp_path / "fox.txt", "--method", "full", *QUICK, "--json", "-q")
    assert result.returncode == 0
    assert result.stderr == ""
    body = json.loads(result.stdout)
    assert body["options"]["kv"] == "read"
    assert body["cases"][0]["context"] > 100


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--method", "fulll"], ["fulll"]),
        (["--method", "full,,quest"], ["empty entry"]),
        (["--method", "full", "--set", "tau=1"], ["tau"]),
        (["--context", "-5"], ["--context"]),
        (["--context", "many"], ["many"]),
        (["--batch-size", "0"], ["--batch-size"]),
        (["--warmup", "-1"], ["--warmup", "-1"]),
        (["--repeat", "0"], ["0"]),
        (["--nvtx", "--context", "100"], ["--nvtx"]),
        (["missing.txt"], ["missing.txt"]),
        (["--html", "no/where.html"], ["--html no/where.html"]),
        (["--trace", "/"], ["--trace /"]),
        (["--trace", "same.json", "-o", "./same.json"], ["-o and --trace name the same file"]),
    ],
)
def test_wrong_usage_is_refused(profile, arguments, words):
    assert_refused(profile(*arguments, "-q"), 2, *words)


def test_a_batch_that_no_machine_holds_is_refused_at_once(profile):
    started = time.monotonic()
    result = profile("--batch-size", "1G", "--context", "1K", "-q")
    assert_refused(result, 3, "memory", "1,073,741,824 contexts of up to 1,024 tokens")
    assert "--batch-size" in result.stderr
    assert time.monotonic() - started < 20


def test_what_cannot_fit_is_refused(warm):
    result = warm(
        "profile", "--load-format", "dummy", "-m", "llama-3.1-8b", "--context", "100M", "--method", "full", "-q"
    )
    assert_refused(result, 3, "memory")
    assert "--batch-size" in result.stderr
    assert "--num-samples" not in result.stderr


def test_figures_survive_a_file_that_cannot_be_written(profile):
    result = profile("--method", "full", "--context", "100", *QUICK, "-o", "/dev/full", "-q")
    assert result.returncode == 1
    assert "step at 100 tokens" in result.stdout
    assert "/dev/full: cannot be written" in result.stderr


@pytest.mark.parametrize(
    ("errors", "finished", "code"),
    [
        ([None, None], True, ExitCode.OK),
        ([None, "out of memory"], True, ExitCode.PARTIAL),
        (["out of memory"], True, ExitCode.RUNTIME),
        ([None], False, ExitCode.INTERRUPTED),
    ],
)
def test_the_exit_code_says_how_it_ended(errors, finished, code):
    cases = [Case(str(i), "method", 1, 1, error=error) for i, error in enumerate(errors)]
    assert exit_code(ProfileReport({}, {}, {}, {}, cases, finished)) == code
