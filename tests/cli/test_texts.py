import io

import pytest

from kvcli.cli.presentation import SequenceWriter, StdoutLost, texts
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


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_control_characters_are_escaped_on_a_terminal_alone():
    text = "a\x1b]0;title\x07b\tc\r\nd\x7f\x9b31m \u200d grün\n"
    for stream, shown in ((io.StringIO(), text), (Terminal(), None)):
        write = SequenceWriter(stream, ["a\x1b[31m"], headed=True)
        write.text(0, text)
        assert stream.getvalue() == (
            f"==> a\x1b[31m <==\n{shown}"
            if shown
            else ("==> a\\x1b[31m <==\na\\x1b]0;title\\x07b\tc\\x0d\nd\\u007f\\u009b31m \u200d grün\n")
        )


class Full(io.StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device")


def test_a_stream_that_fails_stops_the_run_once():
    write = SequenceWriter(Full(), ["a", "b"], headed=True)
    with pytest.raises(StdoutLost):
        write.text(0, "one")
    write.text(0, "two")
    write.text(1, "three")
    write.close()
    assert write.failure.strerror == "No space left on device"
