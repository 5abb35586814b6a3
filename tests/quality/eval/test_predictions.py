"""The file of predictions: it only grows, survives being cut anywhere, and belongs to one run."""

import json
import resource
from dataclasses import replace
from pathlib import Path

import pytest
from answers import ONE

from kvcli.errors import ExitCode, KvcliError
from kvcli.quality.eval.predictions import Predictions

RUN = {"model": "demo", "seed": 0}


def other(index):
    return replace(ONE, index=index)


def write(path, *indices, run=RUN):
    with Predictions(path, run) as predictions:
        for index in indices:
            predictions.add([other(index)])


def indices(path):
    with Predictions(path, RUN) as predictions:
        return [prediction.index for prediction in predictions]


def test_what_was_added_is_there_when_it_is_opened_again(tmp_path):
    file = tmp_path / "p.jsonl"
    write(file, 0, 1)
    write(file, 2)
    assert indices(file) == [0, 1, 2]
    with Predictions(file, RUN) as predictions:
        assert other(2).key in predictions
        assert other(3).key not in predictions
        assert next(iter(predictions)) == other(0)


def test_a_file_cut_at_any_byte_is_taken_up_with_its_whole_lines(tmp_path):
    file = tmp_path / "p.jsonl"
    write(file, 0, 1)
    whole = file.read_bytes()
    ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
    for size in range(0, len(whole) + 1, 7):
        file.write_bytes(whole[:size])
        write(file, 5)
        assert indices(file) == [*range(max(0, sum(end <= size for end in ends) - 1)), 5]
        assert all(json.loads(line) for line in file.read_text().splitlines())


def test_without_a_file_they_are_kept_in_memory():
    with Predictions(None, RUN) as predictions:
        predictions.add([ONE])
        assert len(predictions) == 1


def test_another_run_is_refused_and_what_differs_is_named(tmp_path):
    file = tmp_path / "p.jsonl"
    write(file, 0)
    known = file.read_bytes()
    with pytest.raises(KvcliError, match=r"differs in seed$") as raised:
        write(file, 1, run=RUN | {"seed": 1})
    assert raised.value.exit_code == ExitCode.USAGE
    assert file.read_bytes() == known


@pytest.mark.parametrize(
    "content", ["my notes\n", "my notes", '{"a": 1}\n', "[]\n", '{"kvcli_eval": 1, "hash": "", "configuration": []}\n']
)
def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path, content):
    file = tmp_path / "p.jsonl"
    file.write_text(content)
    with pytest.raises(KvcliError, match="not a file of predictions"):
        write(file, 0)
    assert file.read_text() == content


@pytest.mark.parametrize("line", ["nonsense", '{"task": "vt"}', "[]"])
def test_a_damaged_line_in_the_middle_is_named(tmp_path, line):
    file = tmp_path / "p.jsonl"
    write(file, 0)
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(KvcliError, match="line 3 is not a prediction"):
        write(file, 1)


def test_what_is_no_file_is_refused_at_once():
    with pytest.raises(KvcliError, match="/dev/null: not a regular file") as raised:
        write(Path("/dev/null"))
    assert raised.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize("room", [0, 900])
def test_a_full_disk_is_named_with_the_file(tmp_path, room):
    file = tmp_path / "p.jsonl"
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(KvcliError, match=r"p\.jsonl: cannot be written") as raised:
            write(file, 0, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert "free some space" in raised.value.hint
    write(file, 2)
    assert indices(file)[-1] == 2


def test_two_runs_at_once_do_not_share_a_file(tmp_path):
    file = tmp_path / "p.jsonl"
    with Predictions(file, RUN), pytest.raises(KvcliError, match="another run is writing"):
        write(file, 0)
    write(file, 0)
    assert indices(file) == [0]
