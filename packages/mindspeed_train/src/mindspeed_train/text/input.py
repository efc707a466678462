"""Documents out of files: plain text, JSON lines, Parquet, and gzip of the first two.

Large inputs are divided into segments that can be read by themselves, so that several processes share them.
Whatever cannot be read is named with its file and line (or row); nothing is left out silently.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mindspeed_core.errors import DataError

SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl", ".ndjson", ".parquet")
_JSON_LINES = (".jsonl", ".ndjson", ".json")
_BLANK_LINES = re.compile(r"\n[ \t\r]*\n")


@dataclass(frozen=True)
class Segment:
    """A part of a file.

    Attributes:
        file: the file.
        start: first byte of JSON lines (a line belongs to the segment in which it begins), first row group of
            Parquet, else 0.
        end: the end of that range, not included; None for the whole file.
        size: bytes that it covers, for the progress.
    """

    file: str
    start: int
    end: int | None
    size: int


@dataclass(frozen=True)
class Reading:
    """The options of reading files.

    Attributes:
        split_documents: None for one document per text file, else end a document at the first blank line
            after this many characters.
        encoding_errors: what to do with text that is not UTF-8: ``error``, ``replace`` bytes, or ``skip`` the
            file or the line.
        json_keys: under which keys (columns) the text is; each gives a document of its own.
    """

    split_documents: int | None = None
    encoding_errors: str = "error"
    json_keys: tuple[str, ...] = ("text",)


def text_files(inputs: Iterable[str | Path], suffixes: Sequence[str] = SUFFIXES) -> list[Path]:
    """List the files to read, sorted within each folder.

    Args:
        inputs: files (taken whatever their suffix) and folders (searched, without hidden entries).
        suffixes: what counts as text in a folder, also with ``.gz`` behind it.

    Raises:
        DataError: an input does not exist, or there is no file at all.
    """
    files: dict[Path, None] = {}
    for given in inputs:
        path = Path(given)
        if path.is_file():
            files[path] = None
        elif path.is_dir():
            for folder, folders, names in os.walk(path):
                folders[:] = sorted(name for name in folders if not name.startswith("."))
                for name in sorted(names):
                    if not name.startswith(".") and _suffix(name) in suffixes:
                        files[Path(folder, name)] = None
        else:
            raise DataError(f"{path}: does not exist; name text files, or folders that contain them")
    if not files:
        raise DataError(
            f"no text file in {', '.join(str(path) for path in inputs) or 'no input'} (looked for "
            f"{', '.join(suffixes)}); name the files, or add --suffix"
        )
    return list(files)


def segments_of(file: Path, size: int) -> list[Segment]:
    """Divide a file into segments of about ``size`` bytes, as far as its format allows."""
    total = _size(file)
    if _suffix(file.name) == ".parquet":
        groups = open_parquet(file).metadata.num_row_groups
        step = max(1, groups * size // max(1, total))
        return [
            Segment(str(file), first, min(first + step, groups), total * min(step, groups - first) // groups)
            for first in range(0, groups, step)
        ]
    if file.suffix.lower() == ".gz" or _suffix(file.name) not in _JSON_LINES or total <= size:
        return [Segment(str(file), 0, None, total)]
    return [
        Segment(str(file), at, min(at + size, total), min(size, total - at)) for at in range(0, total, size)
    ]


def read_segment(segment: Segment, reading: Reading, skipped: list[str]) -> Iterator[str]:
    """Yield the documents of a segment in order; empty ones are left out.

    What was left out because it is not UTF-8 is appended to ``skipped``.

    Raises:
        DataError: the file cannot be read, is cut off, is not UTF-8 or has no text where it should.
    """
    file = Path(segment.file)
    suffix = _suffix(file.name)
    if suffix == ".parquet":
        documents = _parquet_rows(file, segment, reading)
    elif suffix in _JSON_LINES:
        documents = _json_lines(file, segment, reading, skipped)
    else:
        documents = _plain(file, reading, skipped)
    for document in documents:
        if document.strip():
            yield document


def _plain(file: Path, reading: Reading, skipped: list[str]) -> Iterator[str]:
    content = b"".join(line for _, line in lines_of(file, 0, None))
    try:
        text = content.decode("utf-8", "replace" if reading.encoding_errors == "replace" else "strict")
    except UnicodeDecodeError as error:
        if reading.encoding_errors == "skip":
            skipped.append(str(file))
            return
        line_number = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{file}: is not UTF-8: byte 0x{content[error.start]:02x} at offset {error.start} (line "
            f"{line_number}, {error.reason}); {_ENCODING}"
        ) from error
    text = text.removeprefix("\ufeff")
    yield from [text] if reading.split_documents is None else _blocks(text, reading.split_documents)


def _json_lines(file: Path, segment: Segment, reading: Reading, skipped: list[str]) -> Iterator[str]:
    for offset, line in lines_of(file, segment.start, segment.end):
        try:
            text = line.decode("utf-8", "replace" if reading.encoding_errors == "replace" else "strict")
        except UnicodeDecodeError as error:
            where = f"{file}: line {_line_number(file, offset)}"
            if reading.encoding_errors == "skip":
                skipped.append(where)
                continue
            raise DataError(
                f"{where}: is not UTF-8: byte 0x{line[error.start]:02x} at column {error.start + 1}; "
                f"{_ENCODING}"
            ) from error
        if not text.strip():
            continue
        try:
            record: Any = json.loads(text.removeprefix("\ufeff") if offset == 0 else text)
        except ValueError as error:
            where = f"{file}: line {_line_number(file, offset)}"
            if not line.endswith(b"\n"):
                raise DataError(f"{where}: is cut off ({error}); copy the file again") from error
            raise DataError(f"{where}: is not JSON ({error}); correct it, or leave the line out") from error
        for key in reading.json_keys:
            value = record.get(key) if isinstance(record, dict) else None
            if not isinstance(value, str):
                found = ", ".join(map(repr, record)) if isinstance(record, dict) else type(record).__name__
                raise DataError(
                    f"{file}: line {_line_number(file, offset)}: has no text under {key!r} (found {found}); "
                    "name the right key with --json-keys"
                )
            yield value


def _parquet_rows(file: Path, segment: Segment, reading: Reading) -> Iterator[str]:
    source = open_parquet(file)
    missing = [key for key in reading.json_keys if key not in source.schema_arrow.names]
    if missing:
        found = ", ".join(map(repr, source.schema_arrow.names))
        raise DataError(
            f"{file}: has no column {missing[0]!r} (found {found}); name the right column with --json-keys"
        )
    groups = range(segment.start, source.metadata.num_row_groups if segment.end is None else segment.end)
    row = sum(source.metadata.row_group(group).num_rows for group in range(segment.start))
    for group in groups:
        try:
            for batch in source.iter_batches(row_groups=[group], columns=list(reading.json_keys)):
                columns = [batch.column(key).to_pylist() for key in reading.json_keys]
                for values in zip(*columns):
                    row += 1
                    for key, value in zip(reading.json_keys, values):
                        if not isinstance(value, str):
                            raise DataError(
                                f"{file}: row {row}: {key!r} is {type(value).__name__}, not text; name the "
                                "right column with --json-keys"
                            )
                        yield value
        except (OSError, ValueError) as error:
            raise DataError(
                f"{file}: is damaged behind row {row} ({_first_line(error)}); copy the file again"
            ) from error


def open_parquet(file: Path) -> Any:
    """Open a Parquet file.

    Raises:
        DataError: it is none, or the library is missing.
    """
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise DataError(
            f"{file}: Parquet needs a library that is not installed; run pip install pyarrow"
        ) from error
    try:
        return parquet.ParquetFile(file)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{file}: is not a Parquet file, or is cut off ({_first_line(error)}); copy it again"
        ) from error


_ENCODING = "convert the file, or use --encoding-errors replace or --encoding-errors skip"


def lines_of(file: Path, start: int, end: int | None) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that begin within a range, with their offsets in the uncompressed file."""
    offset = start
    read = 0
    try:
        with _open(file) as stream:
            if start:
                # A line that begins before the range belongs to what is before it.
                stream.seek(start - 1)
                offset = start - 1 + len(stream.readline())
            while end is None or offset < end:
                line = stream.readline()
                if not line:
                    return
                read += 1
                yield offset, line
                offset += len(line)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{file}: is cut off or damaged after line {read} ({error}); copy it again"
        ) from error
    except OSError as error:
        raise DataError(
            f"{file}: cannot be read ({error.strerror or error}); leave it out or correct it"
        ) from error


def _open(file: Path) -> BinaryIO:
    if file.suffix.lower() == ".gz":
        return gzip.open(file, "rb")  # type: ignore[return-value]
    return file.open("rb")


def _line_number(file: Path, offset: int) -> int:
    """Return the number of the line at an offset; reads again, since only errors need it."""
    return sum(1 for at, _ in lines_of(file, 0, None) if at <= offset)


def _suffix(name: str) -> str:
    """Return the suffix that names the format, without ``.gz``."""
    path = Path(name.lower())
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror}); leave it out or correct it") from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _blocks(text: str, size: int) -> Iterator[str]:
    start = 0
    for gap in _BLANK_LINES.finditer(text):
        if gap.start() - start >= size:
            yield text[start : gap.start()] + "\n"
            start = gap.end()
    yield text[start:]
