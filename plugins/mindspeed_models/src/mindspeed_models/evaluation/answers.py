"""Answers of a model, written to a file as they come, so that an interrupted evaluation goes on.

An answer is found by a digest of what was asked: prompt, continuation or settings. A line that was cut by the
end of the process is dropped. Failed answers are not written, so that they are asked for again.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from mindspeed_core.errors import UserError
from mindspeed_core.terminal.foreign_text import first_line


class AnswerLog:
    """Answers by what was asked.

    Attributes:
        resumed: answers that were there at the beginning.
    """

    def __init__(self, path: Path | None, model: str) -> None:
        """Read what is there.

        Args:
            path: the file; None keeps answers in memory.
            model: identity of the model; answers of another one are refused.

        Raises:
            UserError: the file is of another model, or cannot be written.
        """
        self._known: dict[str, Any] = {}
        self._file: IO[str] | None = None
        if path is not None:
            whole = self._read(path, model)
            try:
                # What was cut off at its end is written over.
                self._file = path.open("r+" if path.exists() else "w", encoding="utf-8")
                self._file.seek(whole)
                self._file.truncate()
            except OSError as error:
                raise UserError(f"--output: {path} cannot be written ({first_line(error)})") from error
            if whole == 0:
                self._write({"model": model})
        self.resumed = len(self._known)

    def get(self, asked: Any) -> Any:
        """Return an earlier answer, or None."""
        return self._known.get(digest(asked))

    def put(self, asked: Any, answer: Any) -> None:
        """Keep an answer."""
        key = digest(asked)
        self._known[key] = answer
        if self._file is not None:
            self._write({"asked": key, "answer": answer})

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> AnswerLog:
        """Return the log."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self.close()

    def _write(self, value: Any) -> None:
        assert self._file is not None
        self._file.write(json.dumps(value, ensure_ascii=False) + "\n")
        self._file.flush()

    def _read(self, path: Path, model: str) -> int:
        """Read whole lines; returns the number of their bytes."""
        if not path.exists():
            return 0
        whole = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    record = json.loads(line)
                    if number == 1:
                        other = record["model"]
                    else:
                        self._known[record["asked"]] = record["answer"]
                except (ValueError, KeyError, TypeError) as error:
                    raise UserError(
                        f"--output: {path} line {number} is damaged; remove the file to ask everything again"
                    ) from error
                if number == 1 and other != model:
                    raise UserError(
                        f"--output: {path} holds answers of another model ({other}); name another folder"
                    )
                whole += len(line)
        return whole


def digest(value: Any) -> str:
    """Return a digest of a JSON value."""
    return hashlib.sha256(json.dumps(value, ensure_ascii=False, sort_keys=True).encode()).hexdigest()[:32]
