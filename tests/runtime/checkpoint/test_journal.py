"""What a journal holds is the last whole writing, or an error that says which file is not."""

import json

import pytest
import torch

import kvcli.runtime.checkpoint.journal as module
from kvcli.errors import ExitCode, KvcliError
from kvcli.memory.state import State, StatePart
from kvcli.runtime.checkpoint.journal import Journal


def state(step):
    """After a step: one entry more of what has settled, and a tensor that is another each time."""
    added = [StatePart("log", step, torch.tensor([step]))]
    return State({"step": step}, added, [StatePart("now", 0, torch.full((3,), step))], {"log": step + 1})


@pytest.fixture
def written(tmp_path):
    journal = Journal.begin(tmp_path / "kept", {"asked.json": b"{}"})
    for step in range(3):
        journal.write(state(step))
    return journal


def read(directory):
    journal = Journal(directory)
    tree = journal.tree()
    return tree, [(part.name, part.values.tolist()) for part in journal.parts()], journal


def reopened(journal):
    journal.close()
    return read(journal.directory)


def test_the_last_writing_is_read_with_all_that_settled_before(written):
    tree, parts, journal = reopened(written)
    assert tree == {"step": 2}
    assert parts == [("log", [0]), ("log", [1]), ("log", [2]), ("now", [2, 2, 2])]
    assert journal.written == {"log": 3}
    assert journal.read("asked.json") == b"{}"


def test_going_on_adds_to_what_is_there(written):
    _, _, journal = reopened(written)
    journal.write(state(3))
    _, parts, _ = reopened(journal)
    assert parts == [*(("log", [step]) for step in range(4)), ("now", [3, 3, 3])]


def test_a_writing_that_is_cut_off_changes_nothing(written, monkeypatch):
    """Whichever file is the last that reaches its place."""
    for allowed in range(3):
        placed = []
        place = Journal._place

        def cut_off(journal, name, write, place=place, placed=placed, allowed=allowed):
            if len(placed) == allowed:
                (journal.directory / f"{name}.part").write_bytes(b"half")
                raise OSError(28, "No space left on device")
            placed.append(name)
            place(journal, name, write)

        with monkeypatch.context() as patch:
            patch.setattr(Journal, "_place", cut_off)
            with pytest.raises(OSError, match="No space"):
                written.write(state(3))
        assert len(placed) == allowed
        tree, parts, written = reopened(written)
        assert (tree, len(parts)) == ({"step": 2}, 4)
    written.write(state(3))
    assert reopened(written)[0] == {"step": 3}


@pytest.mark.parametrize("name", ["segment-000000.safetensors", "segment-000002.safetensors", "asked.json"])
@pytest.mark.parametrize("damage", ["flip", "tear", "lose"])
def test_a_file_that_is_not_as_it_was_written_is_named(written, name, damage):
    path = written.directory / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    if damage == "lose":
        path.unlink()
    else:
        path.write_bytes(data if damage == "flip" else data[:-1])
    with pytest.raises(KvcliError, match=name) as raised:
        reopened(written)[2].read("asked.json")
    assert raised.value.exit_code is ExitCode.RUNTIME


def test_what_changes_is_checked_too(written):
    (path,) = written.directory.glob("changing-*")
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(KvcliError, match="changing-000003"):
        reopened(written)


def test_a_newer_format_is_refused(written):
    head = written.directory / module.HEAD
    head.write_text(json.dumps({**json.loads(head.read_text()), "format": module.FORMAT + 1, "unknown": 1}))
    with pytest.raises(KvcliError, match=f"format {module.FORMAT + 1}") as raised:
        reopened(written)
    assert raised.value.exit_code is ExitCode.USAGE


@pytest.mark.parametrize("content", ["", "[]", '{"format": "one"}', "not json"])
def test_a_head_of_something_else_is_refused(written, content):
    (written.directory / module.HEAD).write_text(content)
    with pytest.raises(KvcliError, match="not a journal of kvcli"):
        reopened(written)


def test_one_process_at_a_time(written):
    with pytest.raises(KvcliError, match="another process"):
        Journal(written.directory)


def test_begins_only_where_nothing_else_is(written, tmp_path):
    with pytest.raises(KvcliError, match="holds a generation already"):
        Journal.begin(written.directory, {})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").touch()
    with pytest.raises(KvcliError, match=r"something else, thesis\.txt"):
        Journal.begin(tmp_path / "other", {})
    with pytest.raises(KvcliError, match=r"thesis\.txt"):
        Journal.begin(tmp_path / "other" / "thesis.txt", {})
    with pytest.raises(KvcliError, match=r"holds no journal\.json"):
        Journal(tmp_path / "other")


def test_begins_again_where_it_was_cut_off_at_once(tmp_path):
    (tmp_path / "lock").touch()
    (tmp_path / "asked.json.part").touch()
    journal = Journal.begin(tmp_path, {"asked.json": b"{}"})
    assert (journal.tree(), journal.read("asked.json")) == (None, b"{}")


def test_forgets_all_but_the_further_files(written):
    written.add("report.json", b"done")
    written.forget()
    written.close()
    again = Journal(written.directory)
    assert again.tree() is None
    assert again.read("report.json") == b"done"
    assert not list(written.directory.glob("*.safetensors"))


def test_long_parts_come_in_segments_of_their_own(written, monkeypatch):
    monkeypatch.setattr(module, "SEGMENT_BYTES", 100)
    parts = [StatePart(f"p{index}", 0, torch.zeros(10, dtype=torch.float64)) for index in range(3)]
    before = written.head.segments
    written.write(State({}, parts, [], {}))
    assert written.head.segments == before + 3
