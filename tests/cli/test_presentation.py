"""What is shown and returned for each way a run can end, with reports made up."""

import io
import json
from dataclasses import replace

import pytest
from reports import dense_sequence, report_of, retrieving_sequence

from kvcli.cli.presentation import Presentation, SequenceWriter, StdoutLost, texts
from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.options import Output, Tracing
from kvcli.inputs.prompts import FailedPrompt, Prompt
from kvcli.telemetry.report import Memory, Report, Sequence


def prompts(*sources):
    return [Prompt(source, "words") for source in sources]


def shown(entries, num_samples=1, timeline=False, **output):
    return Presentation(entries, num_samples, Tracing(timeline), Output(**output))


FAILED = FailedPrompt("bad.txt", KvcliError("bad.txt: is empty", "give a document with text", ExitCode.USAGE))


def test_texts_come_out_in_order_when_the_run_breaks_off(capsys):
    show = shown(prompts("a", "b"))
    show.observer.text(1, "B")
    show.observer.text(0, "A")
    with pytest.raises(ValueError, match="broken off"), show.abandoned_on_error():
        raise ValueError("broken off")
    assert capsys.readouterr().out == "==> a <==\nA\n\n==> b <==\nB\n"


def test_failed_documents_join_the_report_at_their_place(capsys):
    show = shown([FAILED, *prompts("a"), FAILED], 2, as_json=True)
    sequences = [dense_sequence("a"), replace(dense_sequence("a"), sample=1)]
    assert show.conclude(report_of(*sequences)) == ExitCode.PARTIAL
    out, err = capsys.readouterr()
    body = json.loads(out)["sequences"]
    assert [(s["source"], s["sample"]) for s in body] == [("bad.txt", 0), ("a", 0), ("a", 1), ("bad.txt", 0)]
    assert err.count("kvcli: error: bad.txt: is empty") == 2


def test_nothing_but_failures_ends_with_the_last_one(capsys):
    with pytest.raises(KvcliError) as raised:
        shown([FAILED, FAILED])
    assert raised.value.exit_code == ExitCode.USAGE
    assert capsys.readouterr().err.count("is empty") == 1


def failed(source):
    return replace(dense_sequence(source, steps=0), finish_reason="error", output_tokens=0, text="", error="no tokens")


@pytest.mark.parametrize(
    ("sequences", "code"),
    [
        ([dense_sequence("a"), retrieving_sequence("b")], ExitCode.OK),
        ([dense_sequence("a"), failed("b")], ExitCode.PARTIAL),
        ([failed("a"), failed("b")], ExitCode.RUNTIME),
        ([retrieving_sequence("a", reason="interrupted"), failed("b")], ExitCode.INTERRUPTED),
    ],
)
def test_exit_codes(capsys, sequences, code):
    show = shown(prompts("a", "b"), quiet=True)
    assert show.conclude(report_of(*sequences)) == code
    err = capsys.readouterr().err
    assert err.count("no tokens") == sum(sequence.finish_reason == "error" for sequence in sequences)
    assert ("interrupted" in err) == (code == ExitCode.INTERRUPTED)


def test_quiet_and_statistics_can_both_be_asked_for(capsys):
    shown(prompts("a"), quiet=True, stats=True).conclude(report_of(dense_sequence("a")))
    assert "prefill" in capsys.readouterr().err


def test_a_run_interrupted_before_any_text_has_no_statistics(capsys):
    nothing = replace(dense_sequence("a", steps=0), finish_reason="interrupted", output_tokens=0, text="")
    assert shown(prompts("a"), timeline=True).conclude(report_of(nothing)) == ExitCode.INTERRUPTED
    assert capsys.readouterr().err == "kvcli: interrupted; there was no text yet\n"


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
    assert texts(Report({}, {}, {}, sequences, Memory()), headed=True) == stream.getvalue()


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
