"""Texts for a data set, one at a time: plain files, or tables and lists with a text in each row.

Knows nothing of tokens.
"""

from __future__ import annotations

import csv
import gzip
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mdi.errors import Code, UsageError
from mdi.spec.settings_file import parse_json
from mdi_training.storage import missing

TEXT_SUFFIXES = (".txt", ".md")
# Files with a text in each row. Parquet, which most data sets of the hub are in, needs pyarrow.
ROW_SUFFIXES = (".jsonl", ".jsonl.gz", ".csv", ".parquet")
PIECE_CHARS = 1 << 20


def find_texts(path: Path) -> list[Path]:
    """The file itself, or every text below the folder, sorted by name; only plain ones if there are any.

    Raises:
        UsageError: the path does not exist, or the folder has no text.
    """
    if not path.exists():
        raise UsageError(missing(path, "the text"), code=Code.MISSING)
    if path.is_file():
        return [path]
    for suffixes in (TEXT_SUFFIXES, ROW_SUFFIXES):
        found = sorted(p for p in path.rglob("*") if p.name.lower().endswith(suffixes) and p.is_file())
        if found:
            return found
    raise UsageError(
        f"{path} holds no {' or '.join(TEXT_SUFFIXES)} file, nor one of {', '.join(ROW_SUFFIXES)}", code=Code.EMPTY
    )


def has_rows(path: Path) -> bool:
    """Whether it holds many texts, not one."""
    return path.name.lower().endswith(ROW_SUFFIXES)


def read_texts(paths: list[Path], column: str) -> Iterator[str]:
    """The texts of all files, one after another; empty rows are left out.

    Args:
        column: of the text, in files with rows.

    Raises:
        UsageError: a file cannot be read, or has no such column; names the row.
    """
    for path in paths:
        if has_rows(path):
            yield from (text for text in _rows(path, column) if text.strip())
        else:
            yield read_text(path)


def read_text(path: Path) -> str:
    """The text as it is on disk, line ends included, less a byte order mark.

    Raises:
        UsageError: not UTF-8 (says at which byte), empty, or unreadable.
    """
    try:
        raw = path.read_bytes()
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as err:
        raise UsageError(
            f"{path} is not UTF-8: byte 0x{raw[err.start]:02x} at offset {err.start}; "
            "convert it, e.g. with iconv -t UTF-8",
            code=Code.UNREADABLE,
        ) from err
    except OSError as err:
        raise UsageError(f"{path} cannot be read: {err.strerror or err}", code=Code.UNREADABLE) from err
    if not text.strip():
        raise UsageError(f"{path} is empty ({len(raw)} bytes); expected text", code=Code.EMPTY)
    return text


def pieces(text: str, n_chars: int = PIECE_CHARS) -> Iterator[str]:
    """Cuts a long text at ends of lines, so that it can be encoded bit by bit with progress and little memory.

    A cut comes before the white space between two words: byte-level BPE never merges over that, so the pieces give the
    same ids as the whole. Tokenizers that put a space before a text give one more at each cut.
    """
    start = 0
    while start < len(text):
        stop = min(start + n_chars, len(text))
        while stop < len(text) and not (text[stop] == "\n" and not text[stop - 1].isspace()):
            stop += 1
        yield text[start:stop]
        start = stop


def _rows(path: Path, column: str) -> Iterator[str]:
    name = path.name.lower()
    try:
        if name.endswith(".parquet"):
            yield from _parquet(path, column)
        elif name.endswith(".csv"):
            yield from _csv(path, column)
        else:
            yield from _json_lines(path, column)
    except (OSError, EOFError, UnicodeDecodeError) as err:
        raise UsageError(f"{path} cannot be read: {err}", code=Code.UNREADABLE) from err


def _json_lines(path: Path, column: str) -> Iterator[str]:
    with gzip.open(path, "rt", encoding="utf-8") if path.name.endswith(".gz") else open(path, encoding="utf-8") as file:
        for n, line in enumerate(file, start=1):
            if line.strip():
                try:
                    row = parse_json(line)
                except ValueError as err:
                    raise UsageError(f"{path}, line {n} is not JSON: {err}", code=Code.UNREADABLE) from err
                yield _cell(row, column, f"{path}, line {n}")


def _csv(path: Path, column: str) -> Iterator[str]:
    csv.field_size_limit(min(sys.maxsize, (1 << 31) - 1))  # the default is less than a longer article
    with open(path, encoding="utf-8-sig", newline="") as file:
        try:
            for n, row in enumerate(csv.DictReader(file), start=2):
                yield _cell(row, column, f"{path}, row {n}")
        except csv.Error as err:
            raise UsageError(f"{path} is not a CSV file: {err}", code=Code.UNREADABLE) from err


def _parquet(path: Path, column: str) -> Iterator[str]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UsageError(
            f"{path} is a Parquet file: run `pip install pyarrow`, or give the texts in another form", code=Code.LIBRARY
        ) from None
    try:
        with ParquetFile(path) as file:
            if column not in file.schema_arrow.names:
                have = ", ".join(file.schema_arrow.names)
                raise UsageError(
                    f"{path} has no column {column!r}; it has {have}: choose one with --column", code=Code.COLUMN
                )
            for batch in file.iter_batches(batch_size=256, columns=[column]):
                yield from (_cell({column: text}, column, str(path)) for text in batch.column(0).to_pylist())
    except ArrowException as err:
        raise UsageError(
            f"{path} is not a readable Parquet file: {str(err).splitlines()[0]}", code=Code.UNREADABLE
        ) from err


def _cell(row: Any, column: str, where: str) -> str:
    if not isinstance(row, dict) or column not in row:
        have = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
        raise UsageError(f"{where} has no {column!r}; it has {have:.200}: choose one with --column", code=Code.COLUMN)
    if row[column] is None:
        return ""
    if not isinstance(row[column], str):
        raise UsageError(
            f"{where}: {column!r} is not text but {type(row[column]).__name__}: choose another with --column",
            code=Code.COLUMN,
        )
    return str(row[column])
