"""Rows of a benchmark's file, JSONL, CSV or Parquet by its name's end, each with its place for messages."""

import csv
import io
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from kvcli.errors import bad_json, usage_error

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read a file; gives each row and where it stands, "line 3" or "row 3".

    Raises:
        KvcliError: there is no such file, it is not of its form, a row is none (its place is named), what reads it is
            not installed (usage).
    """
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _parquet(path)
    return _csv(path, _text(path, "it should be a CSV file")) if suffix == ".csv" else _json_lines(path)


def _json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    text = _text(path, "it should have one JSON object a line")
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = from_json(line)
        except ValueError as error:
            what = f"{path}: line {number}: {bad_json(error)}"
            raise usage_error(what, "every line is one whole JSON object") from None
        if not isinstance(row, dict):
            what = f"{path}: line {number}: a {type(row).__name__}, not an object"
            raise usage_error(what, 'a line looks like {"...": ...}')
        yield f"line {number}", row


def _csv(path: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows are counted without the header; those of several lines are one."""
    hint = "the first row names the columns, every other one has a field for each"
    number = 0
    try:
        for number, row in enumerate(csv.DictReader(io.StringIO(text, newline=""), strict=True), 1):
            if None in row or None in row.values():
                raise usage_error(f"{path}: row {number}: not as many fields as columns", hint)
            yield f"row {number}", row
    except csv.Error as error:
        raise usage_error(f"{path}: row {number + 1}: bad CSV: {error}", hint) from None


def _parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        lib, parquet = import_module("pyarrow.lib"), import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        what = f"{path}: a Parquet file needs pyarrow, which is not installed"
        raise usage_error(what, "pip install 'kvcli[parquet]'") from None
    try:
        with path.open("rb") as file:
            rows = parquet.ParquetFile(file).read().to_pylist()
    except lib.ArrowException:
        raise usage_error(f"{path}: not a Parquet file", "a .parquet file is read as Parquet") from None
    except OSError as error:
        raise _unreadable(path, error) from None
    yield from ((f"row {number}", row) for number, row in enumerate(rows, 1))


def _text(path: Path, hint: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise _unreadable(path, error) from None
    except UnicodeDecodeError as error:
        raise usage_error(f"{path}: not UTF-8 text (byte {error.start})", hint) from None


def _unreadable(path: Path, error: OSError) -> Exception:
    return usage_error(f"{path}: {(error.strerror or 'cannot be read').lower()}", "check the path")
