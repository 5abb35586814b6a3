"""Documents that are no plain text, made into text by MarkItDown (the extra kvcli[documents])."""

from __future__ import annotations

from io import BytesIO
from pathlib import PurePath

from kvcli.errors import usage_error

_PDF, _ZIP = b"%PDF-", b"PK\x03\x04"
_NAMES = {".pdf": "a PDF file", ".docx": "a Word document", ".html": "an HTML page"}
_CONVERTERS = {".pdf": "PdfConverter", ".docx": "DocxConverter", ".html": "HtmlConverter"}
_PANDOC = "pandoc -t plain {} -o out.txt"
_BY_HAND = {".pdf": "pdftotext {} out.txt", ".docx": _PANDOC, ".html": _PANDOC}


def kind_of(name: str, start: bytes) -> str | None:
    """Tell by a file's name and first bytes which kind of document it is; None where it is none that is converted.

    An HTML page is told by its name alone: it is text, too.
    """
    suffix = PurePath(name).suffix.lower()
    if start.startswith(_PDF):
        return ".pdf"
    if start.startswith(_ZIP) and suffix == ".docx":
        return ".docx"
    return ".html" if suffix in (".html", ".htm", ".xhtml") else None


def text_of(source: str, kind: str, data: bytes) -> str:
    """Convert a document, headings and tables marked as in Markdown.

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
        # Not by the class that chooses among them: it takes what one of them cannot read for plain text.
        converter = getattr(converters, _CONVERTERS[kind])()
        found = converter.convert(BytesIO(data), StreamInfo(extension=kind))
    except Exception as error:  # whatever its parsers raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise usage_error(f"{source}: {_NAMES[kind]} that cannot be converted: {reason[:200]}", by_hand) from error
    if not found.markdown.strip():
        raise usage_error(f"{source}: {_NAMES[kind]} without text", "pictures of text have to be read by OCR first")
    return str(found.markdown)
