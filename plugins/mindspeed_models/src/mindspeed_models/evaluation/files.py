"""Files of benchmarks: each damaged line is one sentence with file and line."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_core.errors import DataError, NamedFileError
from mindspeed_core.terminal.foreign_text import shown

FLAG = "--task-data-path"


def files_in(path: Path, pattern: str, task: str) -> list[Path]:
    """Return the files of a folder by a pattern, or the file itself, sorted.

    Raises:
        NamedFileError: the path does not exist, or holds none.
    """
    if not path.exists():
        raise NamedFileError(FLAG, str(path), "does not exist", f"name the folder of {task}'s files")
    if path.is_file():
        return [path]
    found = sorted(each for each in path.glob(pattern) if each.is_file())
    if not found:
        raise NamedFileError(FLAG, str(path), f"holds no {pattern}", f"name the folder of {task}'s files")
    return found


def split_files(path: Path, split: str, pattern: str, task: str) -> list[Path]:
    """Return the files of one part of the data: those named after it, or all but those of training.

    Raises:
        NamedFileError: there are none.
    """
    found = files_in(path, pattern, task)
    if path.is_file():
        return found
    named = [each for each in found if each.stem == split]
    others = [each for each in found if each.stem != "train"]
    if split and not named:
        raise NamedFileError(FLAG, str(path), f"holds no file of --split {split}", f"name one of {task}'s")
    if not (named or others):
        raise NamedFileError(
            FLAG, str(path), "holds training data alone", "say --split train if that is meant"
        )
    return named or others


def read_lines(path: Path) -> list[tuple[int, Any]]:
    """Return the records of a file of JSON lines with the number of each line.

    Raises:
        DataError: a line is damaged.
    """
    records = []
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if line.strip():
            records.append((number, _json(line, path, number)))
    return records


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        DataError: it is damaged.
    """
    return _json(_text(path), path, 1)


def read_rows(path: Path, columns: int) -> list[list[str]]:
    """Return the rows of a file of comma-separated values.

    Raises:
        DataError: a row has another number of columns.
    """
    rows = []
    reader = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    try:
        for row in reader:
            if not row:
                continue
            if len(row) != columns:
                raise DataError(
                    f"{path} line {reader.line_num}: has {len(row)} columns instead of {columns}; "
                    f"is it a file of another task?"
                )
            rows.append(row)
    except csv.Error as error:
        raise DataError(f"{path} line {reader.line_num}: {shown(error)}; copy the file again") from error
    return rows


def read_table(path: Path, required: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    """Return the rows of a file with a header, with the number of each line.

    Raises:
        DataError: a column is missing, or a row is shorter.
    """
    reader = csv.DictReader(io.StringIO(_text(path), newline=""), strict=True)
    rows = []
    try:
        names = reader.fieldnames or ()
        for name in required:
            if name not in names:
                has = ", ".join(names)
                raise DataError(
                    f"{path} line 1: has no column {name!r} ({has}); is it a file of another task?"
                )
        for row in reader:
            if any(row.get(name) is None for name in required) or None in row:
                raise DataError(f"{path} line {reader.line_num}: has other columns than the header")
            rows.append((reader.line_num, row))
    except csv.Error as error:
        raise DataError(f"{path} line {reader.line_num}: {shown(error)}; copy the file again") from error
    return rows


def field_of(record: Any, name: str, kind: type | tuple[type, ...], path: Path, number: int) -> Any:
    """Return a field of a record.

    Raises:
        DataError: it is missing, or of another type.
    """
    if not isinstance(record, Mapping):
        raise DataError(f"{path} line {number}: is a JSON {type(record).__name__}, not an object")
    if name not in record:
        has = shown(", ".join(map(str, record)), 100)
        raise DataError(f"{path} line {number}: has no field {name!r} ({has}); is it a file of another task?")
    value = record[name]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise DataError(f"{path} line {number}: {name!r} is {type(value).__name__}; copy the file again")
    return value


def sibling(folder: Path, *names: str) -> Path | None:
    """Return the first of some folders or files that exists in a folder or beside it."""
    start = folder if folder.is_dir() else folder.parent
    return next(
        (base / name for name in names for base in (start, start.parent) if (base / name).exists()), None
    )


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is no UTF-8 (byte {error.start}); copy the file again") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _json(text: str, path: Path, number: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} line {number}: is no JSON ({shown(error, 100)}); copy the file again"
        ) from error
