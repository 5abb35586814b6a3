"""Read documents from files and standard input, converting some of them, and questions from -p and files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path, PurePath
from typing import BinaryIO

from kvcli.errors import KvcliError, first_problem, usage_error
from kvcli.inputs.options import QuestionFirst

STDIN = "-"
ALONE = "prompt"
"""The source of a question without a document."""
_PIECE, _LONGEST = 1 << 20, 1 << 30  # bytes
# Files that people take for text: their first bytes, their kind, and how to turn them into text.
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
# Documents that MarkItDown converts (the extra kvcli[documents]), and how to convert them by hand.
_PDF, _ZIP = b"%PDF-", b"PK\x03\x04"
_NAMES = {".pdf": "a PDF file", ".docx": "a Word document", ".html": "an HTML page"}
_CONVERTERS = {".pdf": "PdfConverter", ".docx": "DocxConverter", ".html": "HtmlConverter"}
_PANDOC = "pandoc -t plain {} -o out.txt"
_BY_HAND = {".pdf": "pdftotext {} out.txt", ".docx": _PANDOC, ".html": _PANDOC}


@dataclass(frozen=True)
class Prompt:
    """One prompt before the chat template: a document and a question on it (empty: the text stands alone).

    `id` names the question in the report, if it has a name.
    """

    source: str
    text: str
    question: str = ""
    id: str | None = None
    question_first: QuestionFirst = "no"

    @property
    def is_asked(self) -> bool:
        """Whether -p or a file of questions gave all or some of it."""
        return bool(self.question) or self.source == ALONE

    @property
    def content(self) -> str:
        """The document, a blank line and the question, or in the order set by `question_first`."""
        if not self.question:
            return self.text
        before = [self.question] if self.question_first != "no" else []
        after = [self.question] if self.question_first != "only" else []
        return "\n\n".join([*before, self.text.rstrip(), *after])


@dataclass(frozen=True)
class FailedPrompt:
    """One of several prompts that could not be read; the others continue without it."""

    source: str
    error: KvcliError


def read_prompts(files: Sequence[str], question: str | None = None) -> list[Prompt | FailedPrompt]:
    """Read every document ("-" is standard input) and pair it with `question`, which stands alone without documents.

    Returns one entry per document, in order.

    Raises:
        KvcliError: nothing to read, an empty question, standard input named twice, or a bad document that is the only
            one (usage).
    """
    if question is not None and not question.strip():
        raise usage_error(f"the prompt {question!r} is empty", "give -p some text, or leave it out")
    if not files:
        if question is None:
            raise usage_error("no document and no prompt", 'try: kvcli generate notes.txt -p "What was decided?"')
        return [Prompt(ALONE, question)]
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
    """Read one text file, or standard input for "-", as UTF-8; drop a byte order mark and normalise line ends.

    MarkItDown converts PDF files, Word documents and HTML pages to text.

    Raises:
        KvcliError: the file is missing, unreadable, not text, blank or larger than 1 GiB (usage); bad bytes are found
            while reading.
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
        raise usage_error(f"{source}: {'holds only blanks' if text else 'is empty'}", "give a document with text")
    return text


def _read_text(source: str, file: BinaryIO) -> bytes:
    """Read in pieces and stop at the first sign that it is not text; convert other kinds of documents to text."""
    data = bytearray()
    form = None
    while piece := file.read(_PIECE):
        form = _kind_of(source, piece) if not data else form
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
            raise usage_error(f"{source}: more than {_LONGEST >> 30} GiB of text", "split it: no model takes that much")
    return bytes(data) if form is None else _text_of(source, form, bytes(data)).encode()


def _source(name: str) -> str:
    return "stdin" if name == STDIN else name


def _kind_of(name: str, start: bytes) -> str | None:
    """Tell the kind of a document from its name and first bytes; None if it needs no conversion.

    Only the name tells an HTML page, because it is text itself.
    """
    suffix = PurePath(name).suffix.lower()
    if start.startswith(_PDF):
        return ".pdf"
    if start.startswith(_ZIP) and suffix == ".docx":
        return ".docx"
    return ".html" if suffix in (".html", ".htm", ".xhtml") else None


def _text_of(source: str, kind: str, data: bytes) -> str:
    """Convert a document to text, with headings and tables marked up as in Markdown.

    Raises:
        KvcliError: the converter is not installed, or cannot read the document (usage).
    """
    by_hand = f"convert it: {_BY_HAND[kind].format(source)}"
    try:
        from markitdown import StreamInfo, converters
    except ImportError:
        hint = f"pip install 'kvcli[documents]' reads it; or {by_hand}"
        raise usage_error(f"{source}: {_NAMES[kind]}, not plain text", hint) from None
    try:
        # MarkItDown's own dispatcher would take what a converter cannot read for plain text.
        converter = getattr(converters, _CONVERTERS[kind])()
        found = converter.convert(BytesIO(data), StreamInfo(extension=kind))
    except Exception as error:  # the parsers raise anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise usage_error(f"{source}: {_NAMES[kind]} that cannot be converted: {reason[:200]}", by_hand) from error
    if not found.markdown.strip():
        raise usage_error(f"{source}: {_NAMES[kind]} without text", "run OCR on it first")
    return str(found.markdown)


@dataclass(frozen=True)
class Question:
    """A question and, if it has one, its name in the report."""

    text: str
    id: str | None = None


def read_questions(prompts: Sequence[str], file: str | None = None) -> list[Question]:
    """Read questions from -p, then from a file ("-" is standard input), one per line; blank lines are skipped.

    A file whose first line begins with "{" is JSONL: objects with `question` and an optional `id`.

    Raises:
        KvcliError: an empty question, a file without questions, or a malformed line, with its number (usage).
    """
    for prompt in prompts:
        if not prompt.strip():
            raise usage_error(f"the prompt {prompt!r} is empty", "give -p some text, or leave it out")
    found = [Question(prompt) for prompt in prompts]
    if file is not None:
        lines = read_document(file).split("\n")
        as_json = next(line for line in lines if line.strip()).lstrip().startswith("{")
        numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
        found += [_parse(file, number, line) if as_json else Question(line.strip()) for number, line in numbered]
    return found


def ask(
    entries: Sequence[Prompt | FailedPrompt], questions: Sequence[Question], first: QuestionFirst = "no"
) -> list[Prompt | FailedPrompt]:
    """Ask every question on every document, document by document; without questions the texts stand alone."""
    asked: list[Prompt | FailedPrompt] = []
    for entry in entries:
        if isinstance(entry, FailedPrompt) or not questions:
            asked.append(entry)
        else:
            asked += [replace(entry, question=each.text, id=each.id, question_first=first) for each in questions]
    return asked


def _parse(file: str, number: int, line: str) -> Question:
    hint = 'every line is an object such as {"id": "q1", "question": "Who signed?"}'
    from pydantic import ConfigDict, ValidationError, create_model

    fields = {"question": (str, ...), "id": (str | int | None, None)}
    form = create_model("Line", __config__=ConfigDict(extra="ignore", strict=True), **fields)  # type: ignore[call-overload]
    try:
        found = form.model_validate_json(line)
    except ValidationError as error:
        raise usage_error(f"{file}, line {number}: {first_problem(error)}", hint) from None
    if not found.question.strip():
        raise usage_error(f"{file}, line {number}: the question is empty", hint)
    return Question(found.question, None if found.id is None else str(found.id))
