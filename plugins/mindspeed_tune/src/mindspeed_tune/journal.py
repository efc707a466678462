"""The journal of a search: a file in ``--tune-work-dir`` that gets a line for every result.

A search that is started again on the folder goes on from what is there. A lock keeps a second search out
while the first one runs; it goes with the process, however that ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from mindspeed_core.errors import UserError

NAME = "journal.jsonl"
SCHEMA = 1


class Journal:
    """Results by kind and key, in memory and in a file; a context manager.

    Without a folder they are kept in memory alone.
    """

    def __init__(self, folder: Path | None, facts: Mapping[str, Any]) -> None:
        """Describe a journal.

        Args:
            folder: where its file is; made when it is opened.
            facts: what its results hold for: a search of another command, model, space or machine is refused.
        """
        self.folder = folder
        self.facts = dict(facts)
        self.remembered = 0
        self._found: dict[tuple[str, str], Any] = {}
        self._file: IO[str] | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Journal:
        """Open the file and read what it has.

        Raises:
            UserError: it is another search's, in use, damaged or cannot be written.
        """
        if self.folder is None:
            return self
        path = self.folder / NAME
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+", encoding="utf-8")
        except OSError as error:
            raise self._wrong(f"cannot be written ({error}); name another folder") from None
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise self._wrong("another search works in it; wait for it, or name another folder") from None
            self._read()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def get(self, kind: str, key: str) -> Any:
        """Return a result, None where there is none."""
        return self._found.get((kind, key))

    def all(self, kind: str) -> Iterator[tuple[str, Any]]:
        """Yield key and result of every result of a kind, in the order in which they came."""
        yield from [(key, value) for (of, key), value in self._found.items() if of == kind]

    def put(self, kind: str, key: str, value: Any) -> None:
        """Remember a result; it is in the file when this returns. Threads may call it at once.

        Raises:
            UserError: the file cannot be written, because the disk is full for instance.
        """
        with self._lock:
            self._found[kind, key] = value
            self._write({"kind": kind, "key": key, "value": value})

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            # Keys stay in their order: sums over them are equal to the last digit when a search goes on.
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._wrong(
                f"{NAME} cannot be written ({error}); results so far are kept: make room and start the "
                "search again"
            ) from None

    def _read(self) -> None:
        assert self._file is not None
        self._file.seek(0)
        text = self._file.read()
        whole, newline, rest = text.rpartition("\n")
        lines = whole.split("\n") if newline else []
        if rest:
            # The search was killed while it wrote this line: its result is made again.
            self._file.truncate(len((whole + newline).encode()))
        self._file.seek(0, os.SEEK_END)
        if not lines:
            self._write({"kind": "journal", "schema": SCHEMA, "facts": self.facts})
            return
        self._check_head(lines[0])
        for number, line in enumerate(lines[1:], start=2):
            try:
                found = json.loads(line)
                self._found[found["kind"], found["key"]] = found["value"]
            except (ValueError, KeyError, TypeError):
                raise self._wrong(
                    f"line {number} of {NAME} is damaged; delete that line, or name another folder"
                ) from None
        self.remembered = len(self._found)

    def _check_head(self, line: str) -> None:
        try:
            head = json.loads(line)
            schema, facts = head["schema"], head["facts"]
        except (ValueError, KeyError, TypeError):
            raise self._wrong(f"its {NAME} is no journal of a search; name another folder") from None
        if schema != SCHEMA:
            raise self._wrong(
                f"its {NAME} was written by another version of mindspeed-tune (format {schema}, this one has "
                f"{SCHEMA}); name another folder"
            )
        now = json.loads(json.dumps(self.facts))
        other = [name for name in {**now, **facts} if now.get(name) != facts.get(name)]
        if other:
            raise self._wrong(
                f"its journal is of another search: {', '.join(other)} "
                f"differ{'s' if len(other) == 1 else ''}; "
                "name another folder, or delete this one"
            )

    def _wrong(self, problem: str) -> UserError:
        return UserError(f"--tune-work-dir {self.folder}: {problem}")


def digest(text: str) -> str:
    """Return a short name for a long text."""
    return sha256(text.encode()).hexdigest()[:16]
