import io
import os

import pytest

from kvcli.cli.output import SequenceWriter, check_writable, texts, write_file
from kvcli.errors import ExitCode, KvcliError
from kvcli.telemetry.report import Memory, Report, Sequence


def writer(*titles):
    stream = io.StringIO()
    return stream, SequenceWriter(stream, titles, headed=len(titles) > 1)


def test_one_text_streams_raw_and_ends_its_line():
    stream, write = writer("a")
    write.text(0, "one ")
    assert stream.getvalue() == "one "
    write.text(0, "two")
    write.finished(0)
    write.close()
    assert stream.getvalue() == "one two\n"


def test_a_text_that_ends_its_line_gets_no_other():
    stream, write = writer("a")
    write.text(0, "one\n")
    write.close()
    assert stream.getvalue() == "one\n"


def test_no_text_is_nothing():
    stream, write = writer("a")
    write.finished(0)
    write.close()
    assert stream.getvalue() == ""


def test_several_texts_come_one_after_another():
    stream, write = writer("a", "b", "c")
    write.text(1, "B1 ")
    write.text(0, "A1 ")
    write.text(2, "C1")
    assert stream.getvalue() == "==> a <==\nA1 "
    write.finished(2)
    write.text(0, "A2\n")
    write.finished(0)
    assert stream.getvalue() == "==> a <==\nA1 A2\n\n==> b <==\nB1 "
    write.text(1, "B2")
    write.finished(1)
    write.close()
    assert stream.getvalue() == "==> a <==\nA1 A2\n\n==> b <==\nB1 B2\n\n==> c <==\nC1\n"


def test_nothing_is_lost_when_the_end_of_a_sequence_is_not_told():
    stream, write = writer("a", "b")
    write.text(1, "B")
    write.text(0, "A")
    write.close()
    assert stream.getvalue() == "==> a <==\nA\n\n==> b <==\nB\n"


@pytest.mark.parametrize("outcomes", [["A", "B\n", "C"], ["", "B", ""], ["A", "", "C"]])
def test_a_file_holds_what_stdout_would(outcomes):
    sequences = [Sequence(f"{i}", 0, text, [], "length", 1, 1) for i, text in enumerate(outcomes)]
    stream, write = writer(*(sequence.source for sequence in sequences))
    for i in reversed(range(len(sequences))):
        write.text(i, outcomes[i])
        write.finished(i)
    write.close()
    assert texts(Report({}, {}, {}, sequences, Memory()), headed=True, num_samples=1) == stream.getvalue()


def test_a_file_is_replaced_whole_and_keeps_its_mode(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("before")
    path.chmod(0o640)
    write_file(path, "grün\n")
    assert path.read_bytes() == "grün\n".encode()
    assert path.stat().st_mode & 0o777 == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.txt"]


def test_a_new_file_has_the_usual_mode(tmp_path):
    mask = os.umask(0o027)
    try:
        write_file(tmp_path / "out.txt", "x")
    finally:
        os.umask(mask)
    assert (tmp_path / "out.txt").stat().st_mode & 0o777 == 0o640


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real.txt").write_text("before")
    (tmp_path / "link.txt").symlink_to("real.txt")
    write_file(tmp_path / "link.txt", "after")
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "real.txt").read_text() == "after"


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "out.txt"
    path.write_text("before")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(KvcliError) as raised:
        write_file(path, "after")
    assert "No space left on device" in raised.value.what
    assert str(path) in raised.value.what
    assert raised.value.exit_code == ExitCode.RUNTIME
    assert path.read_text() == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.txt"]


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    write_file(path, "words\n")
    assert os.read(reader, 100) == b"words\n"
    os.close(reader)
    assert path.is_fifo()


def test_bad_output_paths_are_refused_before_the_work(tmp_path):
    for path, words in ((tmp_path, "is a directory"), (tmp_path / "no" / "out.txt", "no directory")):
        with pytest.raises(KvcliError) as raised:
            check_writable(path, "-o")
        assert raised.value.exit_code == ExitCode.USAGE
        assert words in raised.value.what
        assert str(path) in raised.value.what
    check_writable(tmp_path / "out.txt", "-o")
