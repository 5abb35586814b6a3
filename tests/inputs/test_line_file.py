import os

import pytest

from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.line_file import LineFile


def lines_in(path):
    return LineFile(path, "notes", b"one", "--notes")


def taken_up(path):
    """What a process that goes on with the file finds, and cuts off behind it."""
    with lines_in(path) as file:
        lines = list(file.lines())
        file.end_after(sum(map(len, lines)))
        file.add(b"more\n")
    return lines


def test_a_cut_off_line_is_taken_away_and_the_file_grows(tmp_path):
    path = tmp_path / "notes"
    assert taken_up(path) == []
    path.write_bytes(b"one\ntwo\nthr")
    assert taken_up(path) == [b"one\n", b"two\n"]
    assert path.read_bytes() == b"one\ntwo\nmore\n"
    path.write_bytes(b"on")
    assert taken_up(path) == []
    assert path.read_bytes() == b"more\n"


def test_what_somebody_else_wrote_is_left_alone(tmp_path):
    path = tmp_path / "notes"
    path.write_bytes(b"two")
    with pytest.raises(KvcliError, match="not a file of notes") as raised:
        taken_up(path)
    assert (raised.value.exit_code, raised.value.hint) == (ExitCode.USAGE, "give --notes another file")
    assert path.read_bytes() == b"two"


def test_one_process_at_a_time_also_where_the_file_was_replaced(tmp_path):
    path = tmp_path / "notes"
    path.write_bytes(b"one\ntwo\n")
    with lines_in(path) as file:
        before = path.stat().st_ino
        file.replace(line for line in file.lines() if line != b"two\n")
        file.add(b"three\n")
        assert path.stat().st_ino != before
        with pytest.raises(KvcliError, match="another run is writing"):
            taken_up(path)
    assert path.read_bytes() == b"one\nthree\n"
    assert taken_up(path) == [b"one\n", b"three\n"]


def test_a_file_that_cannot_be_opened_or_is_none(tmp_path):
    for path, what in ((tmp_path / "none" / "notes", "no such file"), (tmp_path, "not a regular file")):
        with pytest.raises(KvcliError, match=what):
            taken_up(path)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")  # noqa: PTH110
def test_a_disk_that_is_full_is_named_with_the_file(tmp_path):
    path = tmp_path / "notes"
    with lines_in(path) as file, open("/dev/full", "r+b", buffering=0) as full:  # noqa: PTH123
        file._file = full
        with pytest.raises(KvcliError, match="notes: cannot be written: No space left") as raised:
            file.add(b"one\n")
    assert "free some space" in raised.value.hint
