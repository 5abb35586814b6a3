import io
from dataclasses import replace
from types import SimpleNamespace

import pytest
from reports import dense_sequence, report_of, retrieving_sequence
from rich.console import Console
from rich.text import Text

from kvcli.errors import KvcliError
from kvcli.telemetry.report import KVOrigin, Sequence
from kvcli.ui import console as shown
from kvcli.ui.console import EscapingConsole, _TimeLeft, rendered, table_of
from kvcli.ui.escape import visible
from kvcli.ui.summary import Table, duration, heading, per_second, rate, timeline_rows


def screen(width=80, terminal=False, **options):
    return Console(file=io.StringIO(), width=width, force_terminal=terminal, highlight=False, **options)


def lines(console):
    return console.file.getvalue().splitlines()


def statistics(*sequences, width=80, verbose=False, method="freekv"):
    console = screen(width)
    report = report_of(*sequences, method=method)
    shown.print_statistics(report, [sequence.source for sequence in sequences], verbose, console)
    return lines(console)


def timeline(*sequences, width=80):
    console = screen(width)
    shown.print_timeline(report_of(*sequences), [sequence.source for sequence in sequences], console)
    return lines(console)


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (None, "-"),
        (0.8123, "812 us"),
        (4, "4.00 ms"),
        (23.06, "23.1 ms"),
        (999.7, "1.00 s"),
        (1240, "1.24 s"),
        (200e3, "3 min 20 s"),
    ],
)
def test_durations(ms, text):
    assert duration(ms) == text


def test_a_rate_comes_with_its_denominator():
    assert rate(12, 340) == "12 / 340 (3.5 %)"
    assert rate(0, 0) == "0 / 0"
    assert per_second(100, 50.0) == "2,000 tokens/s"
    assert per_second(100, 0.0) == "-"


def test_statistics_of_a_sequence_that_retrieved():
    text = "\n".join(statistics(retrieving_sequence()))
    assert "KV heads 12 / 340 (3.5 %)" in text
    assert "layers 9 / 170 (5.3 %)" in text
    assert "10,201 / 11,000 (92.7 %)" in text
    assert "12.0 MiB · 1.33 MiB per step" in text
    assert "prefill 2.96 MiB · decode 36.0 KiB · 4.00 KiB per step" in text
    assert "3,155 tokens/s" in text
    assert "p50 24.0 ms" in text
    assert "p99 27.9 ms" in text
    assert "12.0 MiB on the host" in text


def test_the_speed_of_a_prefill_counts_the_tokens_that_were_read():
    turn = replace(retrieving_sequence(), kv=KVOrigin(read_tokens=31, shared_tokens=3881))
    assert any(line.endswith("1.24 s · 25.0 tokens/s") for line in statistics(turn))


def test_statistics_leave_out_what_does_not_apply():
    text = "\n".join(statistics(dense_sequence(), method="full"))
    assert not any(word in text for word in ("corrected", "hits", "to device", "budget", "selection"))


def test_statistics_say_when_the_context_fits_into_the_budget():
    assert any(
        "fits into the budget of 256 tokens" in line for line in statistics(replace(dense_sequence(), budget=256))
    )


def test_a_budget_that_is_a_share_shows_the_sizes_of_each_prompt():
    sequence = replace(retrieving_sequence(), budget=285, sink=16, window=64)
    report = report_of(sequence)
    report.profile["settings"] = {"budget": "10%", "sink": 512, "window": 512}
    console = screen()
    shown.print_statistics(report, [sequence.source], False, console)
    text = "\n".join(lines(console))
    assert "budget 10%" in text
    assert "512" not in text
    assert "285 tokens, 10% of the prompt · sink 16 · window 64" in text


@pytest.mark.parametrize(
    ("held", "on_host", "shown_as"),
    [("auto", 0, "demo · full"), ("int8", 0, "demo · full · KV in int8"), ("int8", 9, "demo · full · host KV in int8")],
)
def test_a_form_of_kv_that_was_asked_for_is_named(held, on_host, shown_as):
    report = report_of(dense_sequence(), method="full")
    report = replace(report, memory=replace(report.memory, host_kv_bytes=on_host))
    report.profile["settings"] = {"kv_dtype": held}
    assert heading(report) == shown_as


def test_statistics_show_what_only_the_method_knows():
    sequence = replace(dense_sequence(), method={"realised_budget": 0.123456, "kept_by_layer": [1, 2]})
    rows = statistics(sequence)
    assert "realised budget  0.1235" in "\n".join(rows)
    assert not any("kept" in row for row in rows)


def test_a_single_token_has_no_decode_row():
    assert not any(line.startswith("decode") for line in statistics(dense_sequence(steps=0)))


def test_verbose_statistics_add_settings_versions_and_layers():
    text = "\n".join(statistics(retrieving_sequence(), verbose=True))
    assert "tau=0.9" in text
    assert "0123456789ab" in text
    assert "kvcli 0.1.0" in text
    assert "layer" in text


@pytest.mark.parametrize("width", [80, 120])
def test_several_sequences_have_a_row_each_within_the_width(width):
    failed = Sequence("bad.txt", 0, "", [], "error", 0, 0, error="no such file")
    long_name = retrieving_sequence("a/very/long/path/to/some/book/chapter-one.txt")
    rows = statistics(retrieving_sequence("short.txt"), long_name, failed, dense_sequence("dense.txt"), width=width)
    assert max(map(len, rows)) <= width
    text = "\n".join(rows)
    assert "chapter-one.txt" in text or width == 80
    assert any("bad.txt" in row and "error" in row for row in rows)
    assert "24 / 680 (3.5 %)" in text
    assert sum("dense.txt" in row for row in rows) == (2 if width == 80 else 1)


def test_a_short_timeline_has_a_line_a_step():
    rows = timeline(retrieving_sequence(steps=9))
    assert len(rows) == 2 + 9
    assert "2 / 6" in rows[4]
    assert "4 / 40" in rows[4]
    assert "16.0 KiB" in rows[4]
    bars = [row.count("█") for row in rows[2:]]
    assert bars == sorted(bars)
    assert bars[-1] > bars[0] > 0


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("sequences", [1, 3])
def test_a_long_timeline_stays_short_and_within_the_width(width, sequences):
    rows = timeline(*[retrieving_sequence(steps=1000)] * sequences, width=width)
    assert len(rows) <= 42
    assert max(map(len, rows)) <= width
    assert "…" not in "".join(rows)


def test_ranges_of_a_timeline_add_up():
    steps = retrieving_sequence(steps=1000).steps
    rows = timeline_rows(steps, 37)
    assert len(rows) <= 37
    assert (rows[0].step, rows[-1].last) == (0, 999)
    assert sum(row.misses for row in rows) == sum(step.misses for step in steps)
    assert sum(row.ms * (row.last - row.step + 1) for row in rows) == pytest.approx(sum(step.ms for step in steps))


def test_a_timeline_without_retrieval_shows_time_alone():
    rows = timeline(dense_sequence())
    assert "corrected" not in rows[1]
    assert "missed" not in rows[1]


def test_a_timeline_without_steps_says_so():
    assert any("no decode step" in row for row in timeline(dense_sequence(steps=0)))


def test_bars_are_plain_where_the_encoding_is():
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"), width=80)
    shown.print_timeline(report_of(retrieving_sequence()), ["x"], console)
    console.file.flush()
    assert b"####" in console.file.buffer.getvalue()


def test_errors_are_two_plain_lines(capsys):
    shown.print_error(KvcliError("a [bold]b[/bold]\nc :smile: \x1b[31md " + "x" * 200, "do this"))
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "kvcli: error: a [bold]b[/bold] c :smile: \\x1b[31md " + "x" * 200 + "\nhint: do this\n"


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}])
def test_colour_is_for_terminals_that_want_it(monkeypatch, environment):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    console = screen(terminal=True)
    shown.print_timeline(report_of(retrieving_sequence()), ["x"], console)
    assert ("\x1b[36m" in console.file.getvalue()) == (not environment)


class Sink:
    def __init__(self):
        self.pieces = []

    def text(self, sequence, piece):
        self.pieces.append((sequence, piece))

    def finished(self, sequence):
        self.pieces.append((sequence, None))


def watch(terminal, quiet=False, text_on_screen=True):
    sink, console = Sink(), screen(terminal=terminal)
    watcher = shown.RunConsole(sink, quiet, text_on_screen, console)
    watcher.stage("prefill", 640)
    watcher.advance(320)
    watcher.notice("mind the gap")
    watcher.stage_done()
    watcher.text(0, "word")
    watcher.step(1, 5)
    watcher.finished(0)
    watcher.stage_done()
    assert sink.pieces == [(0, "word"), (0, None)]
    return console.file.getvalue()


def test_progress_is_for_terminals():
    assert "prefill" in watch(terminal=True)
    assert watch(terminal=False) == "kvcli: mind the gap\n"
    assert watch(terminal=True, quiet=True) == ""


@pytest.mark.parametrize(("tokens", "seen"), [(1, False), (5, True)])
def test_a_single_token_needs_no_bar_of_its_own(tokens, seen):
    console = screen(terminal=True)
    watcher = shown.RunConsole(Sink(), False, False, console)
    watcher.stage("prefill", 10)
    watcher.stage_done()
    watcher.step(1, tokens)
    watcher.stage_done()
    assert ("decode" in console.file.getvalue()) == seen


def test_the_prefill_names_its_document_among_several():
    console = screen(terminal=True)
    watcher = shown.RunConsole(Sink(), False, True, console)
    for number, total in ((2, 3), (1, 1)):
        watcher.document(number, total)
        watcher.stage("prefill", 640)
        watcher.stage_done()
    assert "prefill, document 2 of 3" in console.file.getvalue()
    assert "1 of 1" not in console.file.getvalue()


def test_the_first_token_has_both_of_its_times():
    sequence = retrieving_sequence()
    waited = replace(sequence, timing=replace(sequence.timing, ttft_from_start_ms=8400.0))
    assert "first token 1.26 s · 8.40 s from the command's start" in " ".join(" ".join(statistics(waited)).split())
    assert "from the command's start" not in "\n".join(statistics(sequence))
    assert "from start" in "\n".join(statistics(waited, sequence, width=120))
    assert "from start" not in "\n".join(statistics(sequence, sequence, width=120))


@pytest.mark.parametrize("text_on_screen", [True, False])
def test_a_quiet_run_still_says_what_was_not_done(text_on_screen):
    console = screen()
    watcher = shown.RunConsole(Sink(), True, text_on_screen, console)
    watcher.text(0, "The")
    watcher.failure("kept: not written, No space left on device")
    assert console.file.getvalue() == "\n" * text_on_screen + "kvcli: kept: not written, No space left on device\n"


def test_decode_shows_a_bar_only_where_no_text_grows():
    assert "decode" in watch(terminal=True, text_on_screen=False)
    assert "decode" not in watch(terminal=True, text_on_screen=True)


def test_first_tokens_wait_until_all_prompts_are_read():
    sink, console = Sink(), screen(terminal=True)
    watcher = shown.RunConsole(sink, False, True, console, prompts=2)
    for sequence in (0, 1):
        watcher.stage("prefill", 640)
        watcher.stage_done()
        watcher.text(sequence, f"first {sequence}")
        watcher.step(1, 5)
    assert sink.pieces == []
    watcher.text(0, "second")
    watcher.finished(0)
    watcher.step(2, 5)
    assert sink.pieces == [(0, "first 0"), (1, "first 1"), (0, "second"), (0, None)]
    watcher.text(1, "more")
    assert sink.pieces[-1] == (1, "more")


def test_names_of_documents_are_whole_at_80_columns():
    names = ["chapter-one.txt", "chapter-two.txt"]
    text = "\n".join(statistics(*map(retrieving_sequence, names), width=80))
    assert all(text.count(name) >= 2 for name in names)


@pytest.mark.parametrize("terminal", [True, False])
def test_control_characters_of_others_are_escaped_on_a_terminal_alone(terminal):
    console = EscapingConsole(file=io.StringIO(), force_terminal=terminal, color_system=None, markup=False)
    table = table_of(Table(("task", "score"), [("a\x1b]0;t\x07[red]\x9b", "1")]))
    console.print(table)
    text = console.file.getvalue()
    assert "[red]" in text or terminal  # cut: an escape is longer than what it stands for
    assert ("\x1b" in text, "\\x1b]0;t" in text) == (not terminal, terminal)


def test_the_name_of_a_stage_is_no_markup():
    console = screen(terminal=True)
    watcher = shown.RunConsole(None, False, False, console)
    watcher.stage("[bold]x[/bold]", 10)
    watcher.stage_done()
    assert "[bold]x[/bold]" in console.file.getvalue()


def test_the_time_left_follows_the_mean_speed():
    def told(completed, elapsed):
        return _TimeLeft().render(SimpleNamespace(completed=completed, total=1000, elapsed=elapsed)).plain

    assert told(10, 1.0) == "-:--:--"
    assert told(250, 10.0) == "0:00:30"


def test_what_others_wrote_is_escaped_in_a_result_and_its_colours_are_not(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = rendered(Text("a\x1b]0;title", style="bold"), to_file=False)
    assert text == visible(text) == "\x1b[1ma\\x1b]0;title\x1b[0m\n"
    assert visible(text + text) == text + text
    assert visible(text + "\x1b[1mb") == text.replace("\x1b", "\\x1b") + "\\x1b[1mb"
    assert visible(rendered(Text("a\x1b", style="bold"), to_file=True)) == "a\\x1b\n"


def test_a_note_begins_a_line_of_its_own_within_a_text():
    console = screen()
    watcher = shown.RunConsole(None, False, text_on_screen=True, console=console)
    watcher.notice("before")
    watcher.text(0, "The")
    watcher.notice("compiling")
    watcher.notice("compiled")
    watcher.text(0, " end.\n")
    watcher.notice("after")
    assert lines(console) == ["kvcli: before", "", "kvcli: compiling", "kvcli: compiled", "kvcli: after"]
