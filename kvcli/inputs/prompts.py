"""From files, standard input and -p to token ids: reading, chat template, tokenising."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvcli.errors import ExitCode, KvcliError

if TYPE_CHECKING:
    pass

STDIN = "-"


@dataclass(frozen=True)
class Prompt:
    """One prompt before the chat template: a document and the question after it (empty: the text stands alone)."""

    source: str
    text: str
    question: str = ""

    @property
    def content(self) -> str:
        """Document, blank line, question."""
        return f"{self.text.rstrip()}\n\n{self.question}" if self.question else self.text


@dataclass(frozen=True)
class FailedPrompt:
    """A prompt of several that could not be read; the others go on without it."""

    source: str
    error: KvcliError


def read_prompts(files: Sequence[str], question: str | None = None) -> list[Prompt | FailedPrompt]:
    """Read every document ("-" is standard input) and pair it with `question`; without documents the question is it.

    Returns one entry a document, in order. Raises `KvcliError` (usage) for nothing to read, for an empty question,
    for standard input named twice, and for a bad document that is the only one.
    """
    if question is not None and not question.strip():
        raise _usage(f"the prompt {question!r} is empty", "give -p some text, or leave it out")
    if not files:
        if question is None:
            raise _usage("no document and no prompt", 'try: kvcli generate notes.txt -p "What was decided?"')
        return [Prompt("prompt", question)]
    if list(files).count(STDIN) > 1:
        raise _usage("standard input (-) is named twice", "name it once")
    prompts: list[Prompt | FailedPrompt] = []
    for name in files:
        try:
            prompts.append(Prompt(_source(name), read_document(name), question or ""))
        except KvcliError as error:
            if len(files) == 1:
                raise
            prompts.append(FailedPrompt(_source(name), error))
    return prompts


def read_document(name: str) -> str:
    """Read one text file, or standard input for "-": UTF-8, a byte-order mark dropped, line ends made plain.

    Raises `KvcliError` (usage) for what is missing, unreadable, not text, or blank.
    """
    source = _source(name)
    try:
        data = sys.stdin.buffer.read() if name == STDIN else Path(name).read_bytes()
    except FileNotFoundError:
        raise _usage(f"{source}: no such file", "check the path, or use - for standard input") from None
    except IsADirectoryError:
        raise _usage(f"{source}: is a directory", "name the text files in it") from None
    except PermissionError:
        raise _usage(f"{source}: permission denied", "make the file readable for you") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise _usage(f"{source}: cannot be read: {reason}", "check the path") from None
    if b"\0" in data:
        raise _usage(f"{source}: binary file (NUL byte at {data.index(0)})", "give plain UTF-8 text")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        found = f"byte 0x{data[error.start]:02x} at {error.start}"
        raise _usage(f"{source}: not UTF-8 text ({found})", "convert it, for example with iconv -t UTF-8") from None
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise _usage(f"{source}: {'holds only blanks' if text else 'is empty'}", "a document needs some text")
    return text


def _source(name: str) -> str:
    return "stdin" if name == STDIN else name


def _usage(what: str, hint: str) -> KvcliError:
    return KvcliError(what, hint, ExitCode.USAGE)
