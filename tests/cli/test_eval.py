"""`kvcli eval` as a user meets it: tables, resuming, and what it refuses."""

import json

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
