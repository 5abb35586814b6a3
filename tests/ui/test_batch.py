"""How a batch is shown."""

import io

from rich.console import Console

from kvcli.telemetry.observer import Progress
from kvcli.ui.console import BatchDisplay, render_batch
from kvcli.ui.summary import progress_rows

HALF = Progress(
    total=2000,
    earlier=400,
    earlier_failed=1,
    done=500,
    failed=2,
    in_flight=16,
    prompt_tokens=70_000,
    shared_tokens=9000,
    output_tokens=5000,
    seconds=50,
    prefill_seconds=10,
    decode_seconds=35,
    steps=500,
    left_seconds=90,
    output_tokens_per_second=100,
)


def test_a_summary_says_what_there_is():
    assert dict(progress_rows(HALF)) == {
        "rows": "902 of 2,000 have a result, 400 of them from before",
        "failed": "3; redo them with --retry-errors",
        "in flight": "16",
        "prompts": "70,000 tokens read and 9,000 shared",
        "output": "5,000 tokens, 100.0 per second, 10.0 rows per step",
        "time": "50.0 s, prefill 20%, decode 70%",
        "left": "about 90.0 s",
    }
    assert list(dict(progress_rows(Progress(total=3)))) == ["rows"]


def test_a_line_on_a_terminal_and_nothing_elsewhere():
    shown = {}
    for terminal in (True, False):
        text = io.StringIO()
        display = BatchDisplay(False, Console(file=text, force_terminal=terminal, width=120))
        display.show(HALF)
        display.end()
        shown[terminal] = text.getvalue()
    assert (
        "902 of 2,000 rows, 2 failed, 16 in flight, 100 tokens/s, prefill 20%, decode 70%, 0:01:30 left" in shown[True]
    )
    assert shown[False] == ""


def test_the_status_is_plain_text():
    assert render_batch(HALF).splitlines()[0] == "rows       902 of 2,000 have a result, 400 of them from before"
