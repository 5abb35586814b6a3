"""How one `kvcli generate` is shown, while it runs and when it is over."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvcli.cli.output import OutputWriter, stdout_failure
from kvcli.cli.texts import SequenceWriter, StdoutLost, texts, title, titles_of
from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.prompts import FailedPrompt, Prompt
from kvcli.telemetry.report import Report
from kvcli.telemetry.report import Sequence as ReportedSequence

if TYPE_CHECKING:
    from kvcli.ui.console import RunConsole


@dataclass
class Presentation:
    """Decides what goes to stdout, to stderr and to a file, and with which exit code it ends.

    Documents that could not be read are reported at once, and join the report as failed sequences at their place.
    """

    entries: Sequence[Prompt | FailedPrompt]
    num_samples: int
    output: Path | None = None
    as_json: bool = False
    quiet: bool = False
    verbose: bool = False
    timeline: bool = False
    stats: bool | None = None
    trace: Path | None = None

    def __post_init__(self) -> None:
        from kvcli.ui.console import RunConsole, print_error

        self._headed = len(self.entries) * self.num_samples > 1
        self.prompts = [entry for entry in self.entries if isinstance(entry, Prompt)]
        failed = [entry.error for entry in self.entries if isinstance(entry, FailedPrompt)]
        for error in failed if self.prompts else failed[:-1]:
            print_error(error)
        if not self.prompts:
            raise failed[-1]
        several = len({(each.question, each.id) for each in self.prompts}) > 1
        titles = [
            title(each.source, sample, self.num_samples, (each.id or each.question) if several else None)
            for each in self.prompts
            for sample in range(self.num_samples)
        ]
        streamed = not self.as_json and self.output is None
        self._writer = SequenceWriter(sys.stdout, titles, self._headed) if streamed else None
        on_screen = self._writer is not None and sys.stdout.isatty()
        self.observer: RunConsole = RunConsole(self._writer, self.quiet, on_screen, prompts=len(self.prompts))

    def conclude(self, report: Report, trace: Callable[[], str] | None = None) -> ExitCode:
        """Write what is left to write, show statistics, and choose the exit code; `trace` gives what --trace takes.

        Raises:
            KvcliError: an output could not be written; all others are.
            BrokenPipeError: the reader of stdout has gone; the files are written.
        """
        whole = self._with_failed(report)
        writer = OutputWriter()
        self._write_text(whole, writer)
        if self.trace is not None and trace is not None:
            writer.file(self.trace, trace())
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
            whole = report.to_json() + "\n" if self.as_json else texts(report, self._headed, self.num_samples)
            writer.result(self.output, whole)
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

        titles = titles_of(report, self.num_samples)
        any_text = any(sequence.output_tokens for sequence in report.sequences)
        if self.timeline and any_text:
            print_timeline(report, titles)
        if (not self.quiet if self.stats is None else self.stats) and any_text:
            print_statistics(report, titles, self.verbose)
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
            print_note("interrupted; " + ("the text up to here was kept" if any_text else "there was no text yet"))
            return ExitCode.INTERRUPTED
        if "error" not in reasons:  # the text is whole; a store that lacks something costs nothing
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
