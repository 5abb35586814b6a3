"""Prompts from files, standard input and -p."""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from kvcli.errors import KvcliError, usage_error
from kvcli.inputs.documents import kind_of, text_of

STDIN = "-"
_PIECE, _LONGEST = 1 << 20, 1 << 30  # bytes
# How files begin that people take for text, what they are, and how they become text.
_IMAGES = "kvcli runs the text side of models; describe {} in words"
_KINDS = (
    (
        b"PK\x03\x04",
        "a zip archive or an office document (docx, odt, epub)",
        "convert it: pandoc -t plain {} -o out.txt",
    ),
    (b"\x89PNG", "an image (PNG)", _IMAGES),
    (b"\xff\xd8\xff", "an image (JPEG)", _IMAGES),
    (b"GIF8", "an image (GIF)", _IMAGES),
    (b"\x1f\x8b", "compressed with gzip", "unpack it: zcat {} | kvcli generate -"),
    (b"BZh", "compressed with bzip2", "unpack it: bzcat {} | kvcli generate -"),
    (b"\xfd7zXZ\0", "compressed with xz", "unpack it: xzcat {} | kvcli generate -"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "unpack it: zstdcat {} | kvcli generate -"),
    (b"GGUF", "a GGUF model", "documents are text; -m names the model, as safetensors in a directory"),
    (b"\xff\xfe", "UTF-16 text", "convert it: iconv -f UTF-16 -t UTF-8 {} > out.txt"),
    (b"\xfe\xff", "UTF-16 text", "convert it: iconv -f UTF-16 -t UTF-8 {} > out.txt"),
)


QuestionFirst = Literal["no", "only", "both"]
"""Where the question stands: after the document, before it, or before and after it."""


@dataclass(frozen=True)
class Prompt:
    """One prompt before the chat template: a document and a question on it (empty: the text stands alone).

    `id` is what the question is called in the report, where it was given a name.
    """

    source: str
    text: str
    question: str = ""
    id: str | None = None
    question_first: QuestionFirst = "no"

    @property
    def content(self) -> str:
        """Document, blank line, question; or in the order that `question_first` says."""
        if not self.question:
            return self.text
        before = [self.question] if self.question_first != "no" else []
        after = [self.question] if self.question_first != "only" else []
        return "\n\n".join([*before, self.text.rstrip(), *after])


@dataclass(frozen=True)
class FailedPrompt:
    """A prompt of several that could not be read; the others go on without it."""

    source: str
    error: KvcliError


def read_prompts(files: Sequence[str], question: str | None = None) -> list[Prompt | FailedPrompt]:
    """Read every document ("-" is standard input) and pair it with `question`; without documents the question is it.

    Returns one entry a document, in order.

    Raises:
        KvcliError: nothing to read, an empty question, standard input named twice, or a bad document that is the only
            one (usage).
    """
    if question is not None and not question.strip():
        raise usage_error(f"the prompt {question!r} is empty", "give -p some text, or leave it out")
    if not files:
        if question is None:
            raise usage_error("no document and no prompt", 'try: kvcli generate notes.txt -p "What was decided?"')
        return [Prompt("prompt", question)]
    if list(files).count(STDIN) > 1:
        raise usage_error("standard input (-) is named twice", "name it once")
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
    """Read one text file, or standard input for "-": UTF-8, a byte order mark dropped, line ends made plain.

    PDF files, Word documents and HTML pages become text, see `kvcli.inputs.documents`.

    Raises:
        KvcliError: the file is missing, unreadable, no text, blank or of more than a GiB (usage); what is wrong with
            its bytes is found out while it is read.
    """
    source = _source(name)
    try:
        with nullcontext(sys.stdin.buffer) if name == STDIN else Path(name).open("rb") as file:
            data = _read_text(source, file)
    except FileNotFoundError:
        raise usage_error(f"{source}: no such file", "check the path, or use - for standard input") from None
    except IsADirectoryError:
        raise usage_error(f"{source}: is a directory", "name the text files in it") from None
    except PermissionError:
        raise usage_error(f"{source}: permission denied", "make the file readable for you") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise usage_error(f"{source}: cannot be read: {reason}", "check the path") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        found = f"byte 0x{data[error.start]:02x} at {error.start}"
        raise usage_error(
            f"{source}: not UTF-8 text ({found})", "convert it, for example with iconv -t UTF-8"
        ) from None
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise usage_error(f"{source}: {'holds only blanks' if text else 'is empty'}", "a document needs some text")
    return text


def _read_text(source: str, file: BinaryIO) -> bytes:
    """Read in pieces, and stop where it turns out to be no text; documents of other kinds become text."""
    data = bytearray()
    form = None
    while piece := file.read(_PIECE):
        form = kind_of(source, piece) if not data else form
        data += piece
        if form is not None and len(data) <= _LONGEST:
            continue
        for magic, kind, advice in _KINDS:
            if data.startswith(magic):
                raise usage_error(f"{source}: {kind}, not plain text", advice.format(source))
        if (at := piece.find(0)) >= 0:
            at += len(data) - len(piece)
            raise usage_error(f"{source}: binary file (NUL byte at {at})", "give plain UTF-8 text")
        if len(data) > _LONGEST:
            raise usage_error(
                f"{source}: more than {_LONGEST >> 30} GiB of text", "no model reads that much: give a part"
            )
    return bytes(data) if form is None else text_of(source, form, bytes(data)).encode()


def _source(name: str) -> str:
    return "stdin" if name == STDIN else name
