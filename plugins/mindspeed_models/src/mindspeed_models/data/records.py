"""Records of a corpus: files of every usual format, divided into parts that can be read by themselves.

JSON lines are divided by bytes, Parquet by row groups, a JSON list by its elements; CSV, Arrow, text and
compressed files are read whole. A record that cannot be read is told with its place, and the next one is
read.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_core.errors import ArgumentError, DataError, UserError
from mindspeed_train.interface import Segment, lines_of, open_parquet, segments_of

INPUT = "--input"
FORMATS = {
    "jsonl": "lines",
    "ndjson": "lines",
    "json": "json",
    "parquet": "parquet",
    "csv": "csv",
    "txt": "text",
    "arrow": "arrow",
}


@dataclass(frozen=True)
class Record:
    """A record, or what is in its place.

    Attributes:
        place: its line, row or element, counted from 1 within its segment.
        value: its fields; None where it cannot be read.
        reason: why not; empty for a blank line.
        source: the text that cannot be read.
    """

    place: int
    value: Mapping[str, Any] | None
    reason: str = ""
    source: str = ""


def input_files(given: str) -> list[Path]:
    """Return the files of ``--input``: a file, or those of a folder that have its most frequent format.

    Raises:
        UserError: there are none, or they are programs.
    """
    path = Path(given)
    if path.is_file():
        if path.suffix == ".py":
            raise _program(given)
        _format(path)
        return [path]
    if not path.is_dir():
        reason = "is neither a file nor a folder"
        raise ArgumentError(
            INPUT, given, reason, "check the path, or use --hf-datasets-params for a data set's name"
        )
    if (path / f"{path.name}.py").exists():
        raise _program(given)
    names = [entry for entry in sorted(path.iterdir()) if entry.is_file() and not entry.name.startswith(".")]
    known = Counter(ending for entry in names if (ending := _ending(entry)) in FORMATS)
    if not known:
        raise ArgumentError(INPUT, given, f"holds no file of {', '.join(FORMATS)}", "name files that do")
    most = known.most_common(1)[0][0]
    return [entry for entry in names if _ending(entry) == most]


def _program(given: str) -> UserError:
    reason = "is a program that would load the data, which is not run here"
    return ArgumentError(INPUT, given, reason, "let it write JSON lines or Parquet, and name those")


def divide(file: Path, size: int) -> list[Segment]:
    """Divide a file into segments of about ``size`` bytes; what they are depends on the file alone.

    Raises:
        DataError: it cannot be read.
    """
    kind = _format(file)
    if kind in ("lines", "parquet"):
        return segments_of(file, size)
    total = file.stat().st_size
    if kind == "json" and file.suffix != ".gz":
        if not _is_list(file):
            return segments_of(file, size)
        if total > size:
            return _divide_list(file, size)
    return [Segment(str(file), 0, None, total)]


def read_records(segment: Segment) -> Iterator[Record]:
    """Yield the records of a segment in order.

    Raises:
        DataError: the file is damaged, so that nothing can be read behind some place.
    """
    file = Path(segment.file)
    kind = _format(file)
    if kind == "json" and _is_list(file):
        return _list_elements(file, segment)
    if kind in ("lines", "json"):
        return _lines(file, segment)
    if kind == "parquet":
        return _rows(file, segment)
    if kind == "csv":
        return _csv(file)
    if kind == "arrow":
        return _arrow(file)
    return _text(file)


def _ending(file: Path) -> str:
    return Path(file.stem if file.suffix == ".gz" else file.name).suffix.lstrip(".").lower()


def _format(file: Path) -> str:
    ending = _ending(file)
    if ending not in FORMATS:
        raise ArgumentError(INPUT, str(file), f"is none of {', '.join(FORMATS)}", "convert it to one of them")
    return FORMATS[ending]


def _lines(file: Path, segment: Segment) -> Iterator[Record]:
    for place, (_, line) in enumerate(lines_of(file, segment.start, segment.end), start=1):
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            yield Record(place, None, f"is not UTF-8 ({error.reason})", line.decode("utf-8", "replace"))
            continue
        if not text.strip():
            yield Record(place, None)
            continue
        try:
            value = json.loads(text.removeprefix("\ufeff"))
        except (ValueError, RecursionError) as error:
            yield Record(place, None, f"is not JSON ({error})", text.rstrip("\n"))
            continue
        yield _object(place, value)


def _object(place: int, value: Any) -> Record:
    if isinstance(value, Mapping):
        return Record(place, value)
    return Record(place, None, f"is {type(value).__name__}, no object", json.dumps(value, ensure_ascii=False))


def _is_list(file: Path) -> bool:
    for _, line in lines_of(file, 0, None):
        begin = line.removeprefix(b"\xef\xbb\xbf").lstrip()
        if begin:
            return begin.startswith(b"[")
    return False


def _whole(file: Path) -> str:
    content = b"".join(line for _, line in lines_of(file, 0, None))
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: is not UTF-8 at byte {error.start} ({error.reason}); convert it") from error


def _elements(file: Path, text: str, at: int, end: int | None) -> Iterator[tuple[int, int, Any]]:
    """Yield beginning, end and value of the elements of a list from a position on."""
    decoder = json.JSONDecoder()
    while True:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        if at >= len(text):
            raise DataError(f"{file}: is cut off: its list does not end; copy it again")
        if text[at] == "]" or (end is not None and at >= end):
            return
        try:
            value, until = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{file}: is not JSON ({error}); correct it, or store JSON lines") from error
        yield at, until, value
        at = until


def _divide_list(file: Path, size: int) -> list[Segment]:
    text = _whole(file)
    first = text.index("[") + 1
    begins: list[int] = []
    last = first
    for begin, until, _ in _elements(file, text, first, None):
        if not begins or begin - begins[-1] >= size:
            begins.append(begin)
        last = until
    ends = [*begins[1:], last]
    return [Segment(str(file), begin, end, end - begin) for begin, end in zip(begins, ends)]


def _list_elements(file: Path, segment: Segment) -> Iterator[Record]:
    text = _whole(file)
    start = segment.start or text.index("[") + 1
    for place, (_, _, value) in enumerate(_elements(file, text, start, segment.end), start=1):
        yield _object(place, value)


def _rows(file: Path, segment: Segment) -> Iterator[Record]:
    source = open_parquet(file)
    groups = range(segment.start, source.metadata.num_row_groups if segment.end is None else segment.end)
    place = 0
    try:
        for batch in source.iter_batches(row_groups=list(groups)):
            for value in batch.to_pylist():
                place += 1
                yield Record(place, value)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{file}: is damaged behind row {place} of a part ({error}); copy it again"
        ) from error


def _csv(file: Path) -> Iterator[Record]:
    reader = csv.DictReader(io.StringIO(_whole(file), newline=""))
    for place, row in enumerate(reader, start=1):
        if None in row or None in row.values():
            fields = len(reader.fieldnames or ())
            yield Record(place, None, f"has not the {fields} fields of the header", str([*row.values()]))
        else:
            yield Record(place, row)


def _text(file: Path) -> Iterator[Record]:
    for place, line in enumerate(_whole(file).splitlines(), start=1):
        if line.strip():
            yield Record(place, {"text": line})


def _arrow(file: Path) -> Iterator[Record]:
    try:
        import pyarrow
    except ImportError as error:
        raise UserError(
            f"{file}: Arrow needs a library that is not installed; run pip install 'mindspeed-models[data]'"
        ) from error
    place = 0
    with pyarrow.memory_map(str(file)) as source:
        for batch in pyarrow.ipc.open_stream(source):
            for value in batch.to_pylist():
                place += 1
                yield Record(place, value)


def first_places(segments: Sequence[Segment], counts: Sequence[int]) -> list[int]:
    """Return how many places of the same file come before each segment."""
    seen: dict[str, int] = {}
    before = []
    for segment, count in zip(segments, counts):
        before.append(seen.get(segment.file, 0))
        seen[segment.file] = before[-1] + count
    return before
