"""`kvcli eval` as a user meets it: tables, resuming, and what it refuses."""

import json
import re
import signal
import subprocess
import time

import pytest
from command import assert_refused

ONE = ["eval", "--tasks", "niah_single", "--length", "700", "--limit", "3"]
SMALL = ["--set", "sink=32", "--set", "window=32", "--set", "page_size=32"]


@pytest.fixture(scope="module")
def table(warm, tmp_path_factory):
    """A whole run with its predictions; returns the JSON and the file of predictions."""
    file = tmp_path_factory.mktemp("eval") / "answers.jsonl"
    result = warm(*ONE, "--method", "full,freekv", "--budget", "128,256", *SMALL, "--predictions", file, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout), file


def test_the_help_names_every_task(warm):
    from kvcli.quality.eval.suite import _NAMES

    found = " ".join(re.sub("[│ ]+", " ", warm("eval", "--help", COLUMNS="200").stdout).split())
    assert [name for name in _NAMES if not re.search(rf"\b{name}\b", found)] == []


def without_times(table):
    """What does not depend on the clock."""
    for result in table["results"]:
        result["cost"]["step_ms"] = None
    return table


def test_methods_with_a_budget_stand_there_with_each_and_full_once(table):
    body, _ = table
    assert [variant["label"] for variant in body["variants"]] == ["full", "freekv 128", "freekv 256"]
    assert [result["variant"] for result in body["results"]] == ["full", "freekv 128", "freekv 256"]
    assert body["complete"]
    assert all(result["score"]["examples"] == 3 for result in body["results"])


def test_what_is_attended_keeps_to_the_budget_and_full_reads_all(table):
    body, _ = table
    full, small, large = (result["cost"] for result in body["results"])
    assert full["attended_share"] == 1
    assert full["attended"] > 690
    assert 96 < small["attended"] <= 128 < large["attended"] <= 256
    assert small["bytes_to_device_step"] > 0 == full["bytes_to_device_step"]
    assert small["device_kv_bytes"] < large["device_kv_bytes"] < full["device_kv_bytes"]


@pytest.mark.parametrize("lost", [1, 40, 700, 2000])
def test_a_run_that_was_killed_goes_on_to_the_same_table(warm, table, tmp_path, lost):
    body, whole = table
    file = tmp_path / "cut.jsonl"
    file.write_bytes(whole.read_bytes()[:-lost])
    result = warm(*ONE, "--method", "full,freekv", "--budget", "128,256", *SMALL, "--predictions", file, "--json")
    assert result.returncode == 0, result.stderr
    assert without_times(json.loads(result.stdout)) == without_times(body)
    assert len(file.read_text().splitlines()) == len(whole.read_text().splitlines())


@pytest.mark.parametrize(
    ("options", "said"), [(["--seed", "1"], "seed"), (["--budget", "128"], "variants"), (["--limit", "2"], "limit")]
)
def test_predictions_of_another_run_are_refused(warm, table, options, said):
    _, file = table
    known = file.read_bytes()
    arguments = [*ONE, "--method", "full,freekv", "--budget", "128,256", *SMALL, "-q", "--predictions", file, *options]
    assert_refused(warm(*arguments), 2, "another run", said)
    assert file.read_bytes() == known


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_a_process_that_is_stopped_at_work_is_taken_up(warm, table, tmp_path, sent):
    body, _ = table
    file = tmp_path / "stopped.jsonl"
    arguments = [*ONE, "--method", "full,freekv", "--budget", "128,256", *SMALL, "--predictions", str(file), "--json"]
    with warm.start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while not file.exists() or file.read_bytes().count(b"\n") < 3:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        process.send_signal(sent)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == (-9 if sent is signal.SIGKILL else 130), errors
    if sent is signal.SIGINT:
        assert json.loads(output)["complete"] is False
        assert "answers so far are in" in errors
    result = warm(*arguments)
    assert without_times(json.loads(result.stdout)) == without_times(body)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tasks", "niah_sinlge"], ["niah_sinlge"]),
        (["--tasks", "vt", "--method", "full", "--budget", "4K"], ["'budget'", "full"]),
        (["--tasks", "vt", "--method", "quest", "--set", "tua=1"], ["tua"]),
        (
            ["--tasks", "vt", "--method", "quest", "--budget", "32", "--set", "window=32"],
            ["budget 32 leaves no page", "or lower sink and window"],
        ),
        (["--tasks", "vt,,fwe"], ["--tasks", "empty entry"]),
        (["--tasks", "vt", "--length", "1M"], ["1,048,576", "16,384"]),
        (["--tasks", "vt", "--length", "4K,5"], ["a prompt of 5 tokens", "too short for vt"]),
        (["--tasks", "bad.jsonl"], ["bad.jsonl", "line 2"]),
        (["--tasks", "empty.jsonl"], ["empty.jsonl", "no examples"]),
        (["--tasks", "vt", "-o", "no/where"], ["-o", "no/where"]),
        (["--tasks", "vt", "--suite", "paper-frekv"], ["unknown suite", "paper-frekv"]),
    ],
)
def test_wrong_usage_is_one_line_with_a_way_out(warm, tmp_path, arguments, words):
    (tmp_path / "bad.jsonl").write_text('{"context": "a", "question": "b", "answer": "c"}\n{"cont\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    assert_refused(warm("eval", "-q", *arguments, cwd=tmp_path), 2, *words)


def test_a_grid_is_drawn_and_written_as_a_page(warm, tmp_path):
    page = tmp_path / "grid.html"
    options = ["--length", "300,400", "--depths", "2", "--limit", "1", "--method", "full", "--max-tokens", "30"]
    result = warm("eval", "--tasks", "needle_grid", *options, "--html", page, "-q")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    drawn = lines[lines.index("full: score in %") :]
    assert [line.split() for line in drawn[1:4]] == [
        ["depth", "300", "400"],
        ["0", "%", "100", "100"],
        ["100", "%", "100", "100"],
    ]
    assert "Needle grid" in page.read_text()
    assert "vega-lite" in page.read_text()


def test_a_suite_sets_what_the_command_line_leaves_open(warm, tmp_path):
    row = {"context": "The dog sleeps. " * 40, "question": "Who sleeps?", "answer": "dog"}
    (tmp_path / "longgenbench.jsonl").write_text(json.dumps(row) + "\n")
    own = ["--method", "full,freekv", "--max-tokens", "3", "--top-p", "0.9", "--set", "tau=0.5"]
    named = ["eval", "--suite", "paper-freekv-generation", "--tasks", "longgenbench.jsonl"]
    result = warm(*named, *own, "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "FreeKV, table 2" in result.stderr
    body = json.loads(result.stdout)
    configuration, settings = body["configuration"], body["variants"][1]["settings"]
    assert [variant["label"] for variant in body["variants"]] == ["full", "freekv 2048"]
    assert (configuration["temperature"], configuration["top_p"], configuration["max_tokens"]) == (0.95, 0.9, 3)
    assert settings["tau"] == 0.5


GPQA = "Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3\n"


def test_problems_are_answered_several_times_by_the_template_that_is_asked_for(warm, tmp_path):
    file = tmp_path / "gpqa_diamond.csv"
    file.write_text(GPQA + 'Which?,r,a,b,c\n"Of two\nlines?",r,a,b,c\n')
    arguments = ["eval", "--tasks", file, "--method", "full", "--max-tokens", "6", "--json", "--num-samples", "3"]
    arguments += ["--temperature", "1", "--top-k", "8", "--system", "Be short."]
    result = warm(*arguments, "--chat-template-kwargs", '{"enable_thinking": true}')
    assert result.returncode == 0, result.stderr
    body = json.loads(result.stdout)
    assert body["configuration"]["template"] == {
        "system": "Be short.",
        "raw": False,
        "kwargs": {"enable_thinking": True},
    }
    assert body["configuration"]["top_k"] == 8
    (found,) = body["results"]
    assert (found["task"], found["metric"], found["score"]["examples"]) == ("gpqa_diamond", "final_letter", 2)
    assert list(found["pass_at"]) == ["1", "2", "3"]


def test_a_row_that_is_no_problem_and_variables_that_are_none_are_refused(warm, tmp_path):
    file = tmp_path / "gpqa.csv"
    file.write_text(GPQA + "Which?,r,a,b,c\nWhich?,r,a,b\n")
    assert_refused(warm("eval", "--tasks", file, "-q"), 2, "row 2", "not as many fields as columns")
    assert_refused(warm("eval", "--tasks", file, "-q", "--chat-template-kwargs", "[1]"), 2, "is not a JSON object")


@pytest.mark.parametrize("asked", ["", "ppl:", "fidelity:", "requests:"])
@pytest.mark.parametrize("name", ["plain.jsonl", "with:colon.jsonl"])
def test_the_file_of_a_task_is_not_written_over(warm, tmp_path, asked, name):
    file = tmp_path / name
    file.write_text("{}\n")
    assert_refused(warm("eval", "--tasks", f"{asked}{file}", "-o", file, "-q"), 2, "would overwrite", name)
    assert file.read_text() == "{}\n"


def test_a_picture_is_drawn_in_a_form_that_is_known(warm, tmp_path):
    picture = tmp_path / "scores.svg"
    named = ["--length", "300", "--limit", "1", "--method", "full,quest", "--budget", "96,128", *SMALL]
    result = warm("eval", "--tasks", "niah_single", *named, "--figure", picture)
    assert result.returncode == 0, result.stderr
    assert picture.read_text().startswith("<svg")
    assert f"{picture} shows niah_single; bars are 95 % intervals" in " ".join(result.stderr.split())
    assert_refused(warm("eval", "--tasks", "vt", "--figure", "a.jpg", "-q"), 2, "--figure a.jpg", ".svg, .pdf, .png")
