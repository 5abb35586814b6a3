"""How one `kvcli generate` is shown, while it runs and when it is over."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvcli.cli.output import OutputWriter, stdout_failure
from kvcli.cli.texts import SequenceWriter, StdoutLost, texts, title
from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.prompts import FailedPrompt, Prompt
from kvcli.telemetry.report import Report
from kvcli.telemetry.report import Sequence as ReportedSequence

if TYPE_CHECKING:
    from kvcli.ui.console import RunConsole


class Presentation:
    """Decides what goes to stdout, to stderr and to a file, and with which exit code it ends.

    Documents that could not be read are reported at once, and join the report as failed sequences at their place.
    """

    def __init__(
        self,
        entries: Sequence[Prompt | FailedPrompt],
        num_samples: int,
        output: Path | None = None,
        as_json: bool = False,
        quiet: bool = False,
        verbose: bool = False,
        timeline: bool = False,
        stats: bool | None = None,
        trace: Path | None = None,
    ):
        from kvcli.ui.console import RunConsole, print_error

        self._entries = entries
        self._num_samples = num_samples
        self._output = output
        self._as_json = as_json
        self._trace = trace
        self._verbose = verbose
        self._timeline = timeline
        self._stats = stats if stats is not None else not quiet
        self._headed = len(entries) * num_samples > 1
        self.prompts = [entry for entry in entries if isinstance(entry, Prompt)]
        failed = [entry.error for entry in entries if isinstance(entry, FailedPrompt)]
        if not self.prompts:
            for error in failed[:-1]:
                print_error(error)
            raise failed[-1]
        for error in failed:
            print_error(error)
        self._writer = None if as_json or output is not None else self._stdout_writer()
        on_screen = self._writer is not None and sys.stdout.isatty()
        self.observer: RunConsole = RunConsole(self._writer, quiet, on_screen, prompts=len(self.prompts))

    def conclude(self, report: Report, trace: Callable[[], str] | None = None) -> ExitCode:
        """Write what is left to write, show statistics, and choose the exit code; `trace` gives what --trace takes.

        Raises:
            KvcliError: an output could not be written; all others are.
            BrokenPipeError: the reader of stdout has gone; the files are written.
        """
        whole = self._with_failed(report)
        writer = OutputWriter()
        self._write_text(whole, writer)
        if self._trace is not None and trace is not None:
            writer.file(self._trace, trace())
        if not any(isinstance(failure, BrokenPipeError) for failure in writer.failures):
            self._show(whole, [sequence for sequence in report.sequences if sequence.finish_reason == "error"])
        writer.finish()
        return self._exit_code(whole)

    def abandon(self) -> None:
        """Leave the screen in order when the run ended with an error: no bar, and all the text that there is.

        Raises:
            KvcliError: that error was stdout, which takes no more.
            BrokenPipeError: the reader of stdout has gone.
        """
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
        """Put the result where it belongs; what was streamed is there already."""
        if self._writer is None:
            whole = report.to_json() + "\n" if self._as_json else texts(report, self._headed, self._num_samples)
            writer.result(self._output, whole)
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

        titles = [title(s.source, s.sample, self._num_samples) for s in report.sequences]
        any_text = any(sequence.output_tokens for sequence in report.sequences)
        if self._timeline and any_text:
            print_timeline(report, titles)
        if self._stats and any_text:
            print_statistics(report, titles, self._verbose)
        for sequence in failed:
            print_error(KvcliError(f"{sequence.source}: {sequence.error}"))

    def _exit_code(self, report: Report) -> ExitCode:
        from kvcli.ui.console import print_note

        reasons = [sequence.finish_reason for sequence in report.sequences]
        if "interrupted" in reasons:
            any_text = any(sequence.output_tokens for sequence in report.sequences)
            print_note("interrupted; " + ("the text up to here was kept" if any_text else "there was no text yet"))
            return ExitCode.INTERRUPTED
        if "error" not in reasons:
            return ExitCode.OK
        return ExitCode.RUNTIME if set(reasons) == {"error"} else ExitCode.PARTIAL

    def _stdout_writer(self) -> SequenceWriter:
        titles = [title(p.source, i, self._num_samples) for p in self.prompts for i in range(self._num_samples)]
        return SequenceWriter(sys.stdout, titles, self._headed)

    def _with_failed(self, report: Report) -> Report:
        sequences = list(report.sequences)
        at = 0
        for entry in self._entries:
            if isinstance(entry, FailedPrompt):
                sequences.insert(at, _failed(entry))
                at += 1
            else:
                at += self._num_samples
        return replace(report, sequences=sequences)


def _failed(entry: FailedPrompt) -> ReportedSequence:
    """Make the entry of a report for a document that could not be read."""
    return ReportedSequence(entry.source, 0, "", [], "error", 0, 0, error=entry.error.what)
