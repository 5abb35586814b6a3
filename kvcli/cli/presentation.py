"""Show one `kvcli generate`: its texts while they grow, and the rest at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import TYPE_CHECKING, TextIO

from kvcli.cli.output import OutputWriter, stdout_failure
from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.options import Output, Tracing
from kvcli.inputs.prompts import FailedPrompt, Prompt
from kvcli.telemetry.report import Report
from kvcli.telemetry.report import Sequence as ReportedSequence
from kvcli.ui.escape import visible

if TYPE_CHECKING:
    from kvcli.ui.console import RunConsole


_LONGEST = 60  # characters of a question in a title


@dataclass
class Presentation:
    """Decides what goes to stdout, to stderr and to a file, and the exit code.

    Documents that could not be read are reported at once, and join the report as failed sequences at their place.
    """

    entries: Sequence[Prompt | FailedPrompt]
    num_samples: int
    tracing: Tracing
    output: Output

    def __post_init__(self) -> None:
        from kvcli.ui.console import RunConsole, print_error

        self._headed = len(self.entries) * self.num_samples > 1
        self.prompts = [entry for entry in self.entries if isinstance(entry, Prompt)]
        failed = [entry.error for entry in self.entries if isinstance(entry, FailedPrompt)]
        for error in failed if self.prompts else failed[:-1]:
            print_error(error)
        if not self.prompts:
            raise failed[-1]
        titles = _titles([(each, sample) for each in self.prompts for sample in range(self.num_samples)])
        streamed = not self.output.as_json and self.output.output is None
        self._writer = SequenceWriter(sys.stdout, titles, self._headed) if streamed else None
        on_screen = self._writer is not None and sys.stdout.isatty()
        self.observer: RunConsole = RunConsole(self._writer, self.output.quiet, on_screen, prompts=len(self.prompts))

    def conclude(self, report: Report, trace: Callable[[], str] | None = None) -> ExitCode:
        """Write the remaining output, show statistics, and choose the exit code; `trace` makes the content for --trace.

        Raises:
            KvcliError: an output could not be written; all others are.
            BrokenPipeError: the reader of stdout has gone; the files are written.
        """
        whole = self._with_failed(report)
        writer = OutputWriter()
        self._write_text(whole, writer)
        if self.tracing.trace is not None and trace is not None:
            writer.file(self.tracing.trace, trace())
        if not any(isinstance(failure, BrokenPipeError) for failure in writer.failures):
            self._show(whole, [sequence for sequence in report.sequences if sequence.finish_reason == "error"])
        writer.finish()
        return self._exit_code(whole)

    @contextmanager
    def abandoned_on_error(self) -> Iterator[None]:
        """Leave the screen in order on an error within this context: no bar, and all the text that there is.

        Raises:
            KvcliError: the error was that stdout takes no more.
            BrokenPipeError: the reader of stdout has gone.
        """
        try:
            yield
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        self.observer.stage_done()
        with suppress(StdoutLost):
            self.observer.release()
        if self._writer is None:
            return
        with suppress(StdoutLost):
            self._writer.close()
        if (failure := self._stdout_failure()) is not None:
            raise failure

    def _write_text(self, report: Report, writer: OutputWriter) -> None:
        """Put the result where it belongs; streamed text is there already."""
        if self._writer is None:
            whole = report.to_json() + "\n" if self.output.as_json else texts(report, self._headed)
            writer.result(self.output.output, whole)
            return
        with suppress(StdoutLost):
            self.observer.release()
            self._writer.close()
        if (failure := self._stdout_failure()) is not None:
            writer.failures.append(failure)

    def _stdout_failure(self) -> KvcliError | BrokenPipeError | None:
        error = self._writer.failure if self._writer is not None else None
        return error if error is None or isinstance(error, BrokenPipeError) else stdout_failure(error)

    def _show(self, report: Report, failed: Sequence[ReportedSequence]) -> None:
        """Show timeline and statistics, and the failed prompts that have not been shown yet."""
        from kvcli.ui.console import print_error, print_statistics, print_timeline

        titles = _titles([(each, each.sample) for each in report.sequences])
        any_text = any(sequence.output_tokens for sequence in report.sequences)
        if self.tracing.timeline and any_text:
            print_timeline(report, titles)
        wanted = not self.output.quiet if self.output.stats is None else self.output.stats
        if wanted and any_text:
            print_statistics(report, titles, self.output.verbose)
        for sequence in failed:
            print_error(KvcliError(f"{sequence.source}: {sequence.error}"))
        for entry in report.saved:
            if entry.error is not None and not entry.cached:
                print_error(KvcliError(entry.error))

    def _exit_code(self, report: Report) -> ExitCode:
        from kvcli.ui.console import print_note

        reasons = [sequence.finish_reason for sequence in report.sequences]
        if "interrupted" in reasons:
            any_text = any(sequence.output_tokens for sequence in report.sequences)
            print_note("interrupted; " + ("the text so far was kept" if any_text else "there was no text yet"))
            return ExitCode.INTERRUPTED
        if "error" not in reasons:  # the text is complete; a store that lacks something costs nothing
            return ExitCode.RUNTIME if any(each.error and not each.cached for each in report.saved) else ExitCode.OK
        return ExitCode.RUNTIME if set(reasons) == {"error"} else ExitCode.PARTIAL

    def _with_failed(self, report: Report) -> Report:
        sequences = list(report.sequences)
        at = 0
        for entry in self.entries:
            if isinstance(entry, FailedPrompt):
                failed = ReportedSequence(entry.source, 0, "", [], "error", 0, 0, error=entry.error.what)
                sequences.insert(at, failed)
                at += 1
            else:
                at += self.num_samples
        return replace(report, sequences=sequences)


class StdoutLost(KeyboardInterrupt):
    """Standard output takes no more text: the run ends as after Ctrl-C, with everything so far in its report."""


class SequenceWriter:
    """Writes the texts of several sequences one after another while they grow in parallel.

    The first unfinished sequence streams; text of later ones waits for its turn. `titles` has one entry per sequence;
    they head the texts if there is more than one. On a terminal control characters are escaped.
    """

    def __init__(self, stream: TextIO, titles: Sequence[str], headed: bool):
        self.failure: OSError | None = None
        """The error of the stream, once it has failed; all later text is dropped."""
        self._stream = stream
        self._escaped = stream.isatty()
        self._titles = titles
        self._headed = headed
        self._waiting: dict[int, list[str]] = {}
        self._finished: set[int] = set()
        self._turn = 0
        self._last = ""  # the end of what was written for the sequence whose turn it is
        self._begun = False
        self._gap = ""  # separates the next text from the one before it

    def text(self, sequence: int, piece: str) -> None:
        """Write `piece`, or keep it until the turn of `sequence` comes.

        Raises:
            StdoutLost: the stream has just failed.
        """
        if sequence == self._turn:
            self._write(piece)
        else:
            self._waiting.setdefault(sequence, []).append(piece)

    def finished(self, sequence: int) -> None:
        """Let the next unfinished sequence stream if it was the turn of `sequence`."""
        self._finished.add(sequence)
        while self._turn in self._finished:
            self._end()

    def close(self) -> None:
        """Write what still waits, in order."""
        while self._turn < len(self._titles):
            self._end()

    def _end(self) -> None:
        if self._begun and not self._last.endswith("\n"):
            self._put("\n")
        self._turn += 1
        self._begun, self._last = False, ""
        for piece in self._waiting.pop(self._turn, []):
            self._write(piece)

    def _write(self, piece: str) -> None:
        if not piece:
            return
        if not self._begun and self._headed:
            self._put(self._gap + header(self._titles[self._turn]))
            self._gap = "\n"
        self._begun, self._last = True, piece
        self._put(piece)

    def _put(self, text: str) -> None:
        if self.failure is not None:
            return
        try:
            self._stream.write(visible(text) if self._escaped else text)
            self._stream.flush()
        except OSError as error:
            self.failure = error
            raise StdoutLost from error


def header(title: str) -> str:
    """Return the line above one text of several."""
    return f"==> {title} <==\n"


def _titles(texts: Sequence[tuple[Prompt | ReportedSequence, int]]) -> list[str]:
    """Name texts by their documents, and by their questions and samples if there are several."""
    questions = len({(each.question, each.id) for each, _ in texts}) > 1
    samples = any(sample > 0 for _, sample in texts)
    found = []
    for each, sample in texts:
        asked = (each.id or each.question) if questions else None
        named = each.source if asked is None else f"{each.source}: {shorten(asked, _LONGEST, placeholder='...')}"
        found.append(f"{named} (sample {sample + 1})" if samples else named)
    return found


def texts(report: Report, headed: bool) -> str:
    """Return all texts of a report as one string, as `SequenceWriter` writes them."""
    parts = []
    for sequence, named in zip(
        report.sequences, _titles([(each, each.sample) for each in report.sequences]), strict=True
    ):
        if not sequence.text:
            continue
        head = header(named) if headed else ""
        parts.append(head + sequence.text + ("" if sequence.text.endswith("\n") else "\n"))
    return "\n".join(parts)
