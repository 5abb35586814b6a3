"""The texts of a generation, in the form in which stdout and files get them."""

from collections.abc import Sequence as Many
from textwrap import shorten
from typing import TextIO

from kvcli.telemetry.report import Report
from kvcli.ui.escape import visible

_LONGEST = 60  # characters of a question in a title


class StdoutLost(KeyboardInterrupt):
    """Standard output takes no more text: the run ends as after Ctrl-C, with all that there is in its report."""


class SequenceWriter:
    """Writes the texts of several sequences one after another while they grow side by side.

    The first sequence that is not finished streams; what comes for later ones waits for its turn. `titles` has one
    entry a sequence; they head the texts where there is more than one. On a terminal control characters are shown
    escaped.
    """

    def __init__(self, stream: TextIO, titles: Many[str], headed: bool):
        self.failure: OSError | None = None
        """Why the stream takes no more, once it has failed; what comes after that is dropped."""
        self._stream = stream
        self._escaped = stream.isatty()
        self._titles = titles
        self._headed = headed
        self._waiting: dict[int, list[str]] = {}
        self._finished: set[int] = set()
        self._turn = 0
        self._last = ""  # the end of what was written for the sequence whose turn it is
        self._begun = False
        self._gap = ""  # what parts the next text from the one before it

    def text(self, sequence: int, piece: str) -> None:
        """Write `piece`, or keep it until the turn of `sequence` has come.

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
    """The line above one text of several."""
    return f"==> {title} <==\n"


def title(source: str, sample: int, num_samples: int, question: str | None = None) -> str:
    """How a text of several is named: its document, its question and which sample it is, where there are several."""
    named = source if question is None else f"{source}: {shorten(question, _LONGEST, placeholder='...')}"
    return f"{named} (sample {sample + 1})" if num_samples > 1 else named


def titles_of(report: Report, num_samples: int) -> list[str]:
    """Titles of the texts of a report."""
    several = len({(sequence.question, sequence.id) for sequence in report.sequences}) > 1
    return [
        title(each.source, each.sample, num_samples, (each.id or each.question) if several else None)
        for each in report.sequences
    ]


def texts(report: Report, headed: bool, num_samples: int) -> str:
    """All texts of a report as one string, as `SequenceWriter` writes them."""
    parts = []
    for sequence, named in zip(report.sequences, titles_of(report, num_samples), strict=True):
        if not sequence.text:
            continue
        head = header(named) if headed else ""
        parts.append(head + sequence.text + ("" if sequence.text.endswith("\n") else "\n"))
    return "\n".join(parts)
