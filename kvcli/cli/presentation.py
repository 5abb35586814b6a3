"""How one `kvcli generate` is shown, while it runs and when it is over."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvcli.cli.output import SequenceWriter, failed_sequence, texts, title, write_result
from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.prompts import FailedPrompt, Prompt
from kvcli.telemetry.report import Report

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
    ):
        from kvcli.ui.console import RunConsole, print_error

        self._entries = entries
        self._num_samples = num_samples
        self._output = output
        self._as_json = as_json
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
        self.observer: RunConsole = RunConsole(self._writer, quiet, on_screen)

    def conclude(self, report: Report) -> ExitCode:
        """Write what is left to write, show statistics, and choose the exit code."""
        from kvcli.ui.console import print_error, print_note, print_statistics, print_timeline

        whole = self._with_failed(report)
        unwritten = self._write(whole)
        titles = [title(s.source, s.sample, self._num_samples) for s in whole.sequences]
        any_text = any(sequence.output_tokens for sequence in whole.sequences)
        if self._timeline and any_text:
            print_timeline(whole, titles)
        if self._stats and any_text:
            print_statistics(whole, titles, self._verbose)
        for sequence in report.sequences:
            if sequence.finish_reason == "error":
                print_error(KvcliError(f"{sequence.source}: {sequence.error}"))
        if unwritten is not None:
            raise unwritten
        reasons = [sequence.finish_reason for sequence in whole.sequences]
        if "interrupted" in reasons:
            print_note("interrupted; " + ("the text up to here was kept" if any_text else "there was no text yet"))
            return ExitCode.INTERRUPTED
        if "error" not in reasons:
            return ExitCode.OK
        return ExitCode.RUNTIME if set(reasons) == {"error"} else ExitCode.PARTIAL

    def abandon(self) -> None:
        """Leave the screen in order when the run ended with an error: no bar, and all the text that there is."""
        self.observer.stage_done()
        with suppress(OSError):
            if self._writer is not None:
                self._writer.close()

    def _write(self, report: Report) -> KvcliError | None:
        """Put the result where it belongs; when the file cannot take it, stdout does, and the error comes back."""
        if self._writer is not None:
            self._writer.close()
            return None
        content = report.to_json() + "\n" if self._as_json else texts(report, self._headed, self._num_samples)
        try:
            write_result(self._output, content)
        except KvcliError as error:
            return error
        return None

    def _stdout_writer(self) -> SequenceWriter:
        titles = [title(p.source, i, self._num_samples) for p in self.prompts for i in range(self._num_samples)]
        return SequenceWriter(sys.stdout, titles, self._headed)

    def _with_failed(self, report: Report) -> Report:
        sequences = list(report.sequences)
        at = 0
        for entry in self._entries:
            if isinstance(entry, FailedPrompt):
                sequences.insert(at, failed_sequence(entry.source, entry.error))
                at += 1
            else:
                at += self._num_samples
        return replace(report, sequences=sequences)
