"""The file of results: what is in it survives whatever ends a run."""

import json
from pathlib import Path

import pytest

from kvcli.batch.results import Key, ResultFile, is_written, read_results
from kvcli.errors import KvcliError

KEY = {"row": "1", "profile": "2", "model": "3", "sampling": "4"}


def result(name, failed=False, **key):
    error = {"code": "x", "message": "y"} if failed else None
    response = None if failed else {"body": {"usage": {"completion_tokens": 3}}}
    return {"custom_id": name, "response": response, "error": error, "kvcli": {"key": {**KEY, **key}, "line": 1}}


def names(path):
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


def filled(path, *results):
    with ResultFile(path) as file:
        for each in results:
            file.add(each)


def test_a_run_goes_on_where_another_ended(tmp_path):
    path = tmp_path / "out.jsonl"
    filled(path, result("a"), result("b", failed=True))
    with ResultFile(path) as file:
        assert {name: known.failed for name, known in file.known.items()} == {"a": False, "b": True}
        assert file.known["a"].key == Key(**KEY)
        file.add(result("c"))
    assert names(path) == ["a", "b", "c"]
    assert [found.output_tokens for _, found in read_results(path)] == [3, 0, 3]


def test_a_last_line_that_was_cut_off_is_taken_away_wherever_it_was_cut(tmp_path):
    path = tmp_path / "out.jsonl"
    filled(path, result("a"), result("b"))
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for size in [*range(20), *range(20, len(whole), 17), first - 1, first, first + 1, len(whole) - 1]:
        path.write_bytes(whole[:size])
        with ResultFile(path) as file:
            assert list(file.known) == ["a"] * (size >= first)
            file.add(result("c"))
        assert names(path) == ["a"] * (size >= first) + ["c"]


@pytest.mark.parametrize("text", ["precious", '{"custom_id": "a"}\n', "x\n"])
def test_a_file_of_something_else_is_left_alone(tmp_path, text):
    path = tmp_path / "out.jsonl"
    path.write_text(text)
    with pytest.raises(KvcliError, match="not a file of results"), ResultFile(path):
        pass
    assert path.read_text() == text


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "out.jsonl"
    filled(path, result("a"))
    path.write_text(path.read_text() + "{}\n")
    with pytest.raises(KvcliError, match="line 2 is not a result"), ResultFile(path):
        pass


def test_a_row_twice_is_named(tmp_path):
    path = tmp_path / "out.jsonl"
    filled(path, result("a"), result("a"))
    with pytest.raises(KvcliError, match="line 2: a second result for row 'a'"), ResultFile(path):
        pass


def test_two_runs_do_not_write_to_one_file(tmp_path):
    path = tmp_path / "out.jsonl"
    filled(path, result("a"))
    with ResultFile(path) as file:
        assert is_written(path)
        with pytest.raises(KvcliError, match="another run"), ResultFile(path):
            pass
        file.add(result("b"))
        file.take_out(lambda name: name == "a")  # the file is another one now
        with pytest.raises(KvcliError, match="another run"), ResultFile(path):
            pass
    assert not is_written(path)
    assert names(path) == ["b"]


def test_what_is_taken_out_can_be_done_again(tmp_path):
    path = tmp_path / "out.jsonl"
    filled(path, result("a"), result("b", failed=True), result("c"))
    with ResultFile(path) as file:
        file.take_out(lambda name: file.known[name].failed)
        assert list(file.known) == ["a", "c"]
        file.add(result("b"))
    assert names(path) == ["a", "c", "b"]
    assert [each.name for each in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_full_disk_ends_the_run_with_one_line(tmp_path):
    with ResultFile(tmp_path / "out.jsonl") as file, Path("/dev/full").open("r+b", buffering=0) as full:
        file.file._file = full
        with pytest.raises(KvcliError, match=r"out\.jsonl: cannot be written: No space left"):
            file.add(result("a"))
