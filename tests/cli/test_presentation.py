"""What is shown and returned for each way a run can end, with reports made up."""

import json
from dataclasses import replace

import pytest
from reports import dense_sequence, report_of, retrieving_sequence

from kvcli.cli.presentation import Presentation
from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.options import Output, Tracing
from kvcli.inputs.prompts import FailedPrompt, Prompt


def prompts(*sources):
    return [Prompt(source, "words") for source in sources]


def shown(entries, num_samples=1, timeline=False, **output):
    return Presentation(entries, num_samples, Tracing(timeline), Output(**output))


FAILED = FailedPrompt("bad.txt", KvcliError("bad.txt: is empty", "a document needs some text", ExitCode.USAGE))


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
