"""Tokenizing in parts: shared between processes, kept when the program is killed, joined in order.

How the input is divided depends on the input alone, so the dataset is the same for every number of workers.
A finished part is known by what it was made from; a later run with the same input and options takes it as it
is.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mindspeed_core.errors import DataError, UserError
from mindspeed_train.text.input import Reading, Segment, read_segment, segments_of
from mindspeed_train.text.tokenizer import TextTokenizer, load_tokenizer

PART_BYTES = 16 << 20
_BATCH = 256
_TOKENS, _LENGTHS, _DONE = ".bin", ".npy", ".json"


@dataclass(frozen=True)
class Part:
    """The input that one process tokenizes at a time.

    Attributes:
        name: a digest of what it is made from: the segments, sizes and times of their files, and the work.
        segments: what is read, in order.
    """

    name: str
    segments: tuple[Segment, ...]

    @property
    def size(self) -> int:
        """Return the bytes of input."""
        return sum(segment.size for segment in self.segments)


class Making(Protocol):
    """Makes parts, in this process or in several.

    Attributes:
        folder: where parts are kept.
    """

    @property
    def folder(self) -> str:
        """Return the folder of the parts."""

    def part(self, segments: Sequence[Segment]) -> Part:
        """Return the part that is made of segments of files."""

    def path(self, part: Part, suffix: str) -> Path:
        """Return the path of a file of a part."""

    def open(self) -> Any:
        """Load what making parts needs, once a process."""

    def make(self, part: Part, opened: Any) -> None:
        """Write the files of a part, that with the suffix ``.json`` last."""


@dataclass(frozen=True)
class Work:
    """The options that are the same for all parts, and tokenizing with them.

    Attributes:
        folder: where parts are kept.
        tokenizer: file of the tokenizer.
        tokenizer_type: its type, see `load_tokenizer`.
        identity: of the tokenizer's content.
        reading: how files are read.
        append_eod: end each document with the end-of-document token.
        dtype: name of the type of a token.
        eod_token: the end-of-document token, where a flag names it.
    """

    folder: str
    tokenizer: str
    tokenizer_type: str | None
    identity: str
    reading: Reading
    append_eod: bool
    dtype: str
    eod_token: str | None = None

    def part(self, segments: Sequence[Segment]) -> Part:
        """Make a part with its name."""
        # The identity has what a flag says of the tokenizer.
        beside = ("folder", "tokenizer", "eod_token")
        return named_part(
            {name: value for name, value in asdict(self).items() if name not in beside}, segments
        )

    def path(self, part: Part, suffix: str) -> Path:
        """Return the path of a file of a part."""
        return Path(self.folder, f"{part.name}{suffix}")

    def open(self) -> TextTokenizer:
        """Load the tokenizer."""
        return load_tokenizer(self.tokenizer, self.tokenizer_type, self.eod_token)

    def make(self, part: Part, opened: TextTokenizer) -> None:
        """Tokenize a part."""
        _tokenize(part, self, opened)


def named_part(how: Mapping[str, Any], segments: Sequence[Segment]) -> Part:
    """Return the part that is made of segments of files, as they are now, in a way that plain values tell."""
    read = [[asdict(segment), *file_facts(segment.file)] for segment in segments]
    digest = hashlib.sha256(json.dumps([how, read], sort_keys=True).encode()).hexdigest()
    return Part(f"part-{digest[:32]}", tuple(segments))


def file_facts(file: str | Path) -> list[int]:
    """Return size and time of change: when they are the same, so is the content."""
    stat = os.stat(file)
    return [stat.st_size, stat.st_mtime_ns]


def plan_parts(
    files: Iterable[Path],
    work: Making,
    size: int = PART_BYTES,
    divide: Callable[[Path, int], Sequence[Segment]] = segments_of,
) -> list[Part]:
    """Divide files into parts of about ``size`` bytes, in order: large files are cut, small ones gathered.

    Args:
        files: what is read.
        work: names parts.
        size: of a part, in bytes.
        divide: cuts a file into segments of about so many bytes.
    """
    parts: list[Part] = []
    gathered: list[Segment] = []
    total = 0
    for file in files:
        for segment in divide(file, size):
            gathered.append(segment)
            total += segment.size
            if total >= size:
                parts.append(work.part(gathered))
                gathered, total = [], 0
    return [*parts, work.part(gathered)] if gathered else parts


def make_parts(
    parts: Sequence[Part], work: Work, workers: int, progress: Callable[[int], None]
) -> tuple[int, list[str]]:
    """Tokenize every part that is not there yet.

    Args:
        parts: all parts.
        work: what to do with them.
        workers: number of processes; 1 works in this one.
        progress: called with the bytes of each part as it is finished or found.

    Returns:
        How many parts were found finished, and what was left out because it is not UTF-8.

    Raises:
        DataError: a file cannot be used, or a worker died.
    """
    reused = finish_parts(parts, work, workers, progress)
    return reused, [name for part in parts for name in _facts(work, part)["skipped"]]


def finish_parts(parts: Sequence[Part], work: Making, workers: int, progress: Callable[[int], None]) -> int:
    """Make every part that is not there yet, and remove those of other input.

    Args:
        parts: all parts.
        work: makes one.
        workers: number of processes; 1 works in this one.
        progress: called with the bytes of each part as it is finished or found.

    Returns:
        How many parts were found finished.

    Raises:
        DataError: a file cannot be used, or a worker died.
    """
    expected = {part.name for part in parts}
    for file in Path(work.folder).glob("part-*"):
        if file.name.partition(".")[0] not in expected:
            file.unlink()
    missing = [part for part in parts if not work.path(part, _DONE).is_file()]
    for part in parts:
        if part not in missing:
            progress(part.size)
    reused = len(parts) - len(missing)
    if workers == 1 or len(missing) <= 1:
        opened = work.open() if missing else None
        for part in missing:
            work.make(part, opened)
            progress(part.size)
    else:
        _share(missing, work, min(workers, len(missing)), progress)
    return reused


def join_parts(parts: Sequence[Part], work: Work, tokens_file: Path) -> tuple[np.ndarray, int, int]:
    """Write the tokens of all parts, in order, into one file.

    Returns:
        Tokens of each document ``[documents]`` int32, the number of documents, and the bytes of their text.
    """
    lengths = [np.load(work.path(part, _LENGTHS)) for part in parts]
    with tokens_file.open("wb") as target:
        for part in parts:
            with work.path(part, _TOKENS).open("rb") as source:
                shutil.copyfileobj(source, target, 1 << 20)
    joined = np.concatenate(lengths) if lengths else np.zeros(0, dtype=np.int32)
    return joined, len(joined), sum(_facts(work, part)["text_bytes"] for part in parts)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a second program from writing the same dataset at the same time.

    Raises:
        DataError: one does already.
    """
    with (folder / ".lock").open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(
                f"{folder}: another prepare-text writes this dataset; wait for it, or choose another "
                "--output-prefix"
            ) from error
        yield


def _share(parts: Sequence[Part], work: Making, workers: int, progress: Callable[[int], None]) -> None:
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(work,))
    try:
        running = {pool.submit(_make_here, part): part for part in parts}
        for finished in as_completed(running):
            message = finished.result()
            if message:
                raise DataError(message)
            progress(running[finished].size)
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process died, probably for lack of memory; lower --workers and run the same command "
            "again: finished parts are kept"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_worker: list[Any] = []


def _start_worker(work: Making) -> None:
    # The processes share the machine already; threads of the tokenizer on top would only compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker[:] = [work, work.open()]


def _make_here(part: Part) -> str:
    """Make a part in a worker; return the error as text, since not every error survives being sent."""
    work, opened = _worker
    try:
        work.make(part, opened)
    except UserError as error:
        return str(error)
    except OSError as error:
        return f"{work.folder}: cannot be written ({error}); name a folder that can be in --output-prefix"
    return ""


@contextmanager
def finished(work: Making, part: Part, suffixes: Sequence[str]) -> Iterator[dict[str, Path]]:
    """Yield temporary files of a part to write; behind the block they get their names, the last one last.

    A part counts as finished when its last file is there.
    """
    final = {suffix: work.path(part, suffix) for suffix in suffixes}
    temporary = {suffix: path.with_name(f"{path.name}.{os.getpid()}.tmp") for suffix, path in final.items()}
    try:
        yield temporary
        for suffix, path in final.items():
            os.replace(temporary[suffix], path)
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)


def _tokenize(part: Part, work: Work, tokenizer: TextTokenizer) -> None:
    skipped: list[str] = []
    lengths: list[int] = []
    text_bytes = 0
    with finished(work, part, (_TOKENS, _LENGTHS, _DONE)) as temporary:
        with temporary[_TOKENS].open("wb") as stream:
            for texts in _batches(part, work.reading, skipped):
                for text, ids in zip(texts, tokenizer.tokenize_batch(texts)):
                    if work.append_eod:
                        ids.append(tokenizer.eod)
                    stream.write(np.asarray(ids, dtype=work.dtype).tobytes())
                    lengths.append(len(ids))
                    text_bytes += len(text.encode())
        with temporary[_LENGTHS].open("wb") as stream:
            np.save(stream, np.asarray(lengths, dtype=np.int32))
        temporary[_DONE].write_text(json.dumps({"text_bytes": text_bytes, "skipped": skipped}))


def _batches(part: Part, reading: Reading, skipped: list[str]) -> Iterator[list[str]]:
    documents = (text for segment in part.segments for text in read_segment(segment, reading, skipped))
    while batch := list(islice(documents, _BATCH)):
        yield batch


def _facts(work: Work, part: Part) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(work.path(part, _DONE).read_text())
    return facts
