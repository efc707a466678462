"""Work on files that may be killed at any moment: what is finished of it, and whether it can go on.

A folder beside the result holds finished parts and the identity of the work. The result gets its own name
when all parts are there, so that it exists whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed_core.errors import DataError
from mindspeed_train.interface import publish

_IDENTITY = "work.json"


class UnfinishedWork:
    """The folder of work that is under way.

    Attributes:
        folder: holds the parts.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], *, resume: bool) -> None:
        """Begin, or go on where an earlier process stopped.

        Args:
            folder: of the parts.
            identity: what the result depends on: sources with size and time, options; plain values.
            resume: keep what an earlier process has finished. Otherwise it is removed.

        Raises:
            DataError: what is there belongs to other work, or the folder cannot be made.
        """
        self.folder = folder
        text = described(identity)
        known = folder / _IDENTITY
        try:
            if resume and known.is_file():
                if known.read_text(encoding="utf-8") != text:
                    raise DataError(
                        f"--resume: {folder} holds unfinished work on other files or with other flags; "
                        "repeat the "
                        "command as it was, or leave --resume out to begin anew"
                    )
                return
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir(parents=True)
            # At once: half of it would be taken for other work.
            self.write(_IDENTITY, text)
        except OSError as error:
            raise DataError(f"{folder}: {error.strerror or error}; choose another output folder") from error

    def has(self, name: str) -> bool:
        """Return whether a part is finished."""
        return (self.folder / name).is_file()

    def temporary(self, name: str) -> Path:
        """Return where a part is written before it is finished."""
        return self.folder / f"{name}.tmp"

    def finish(self, name: str) -> None:
        """Give a part that was written and forced to disk its own name."""
        os.replace(self.temporary(name), self.folder / name)
        publish.sync_directory(self.folder)

    def write(self, name: str, content: str) -> None:
        """Write a small part at once."""
        publish.write_synced(self.temporary(name), content)
        self.finish(name)

    def publish(self, final: Path) -> None:
        """Give the finished work its final name.

        Raises:
            DataError: the operating system refused.
        """
        try:
            (self.folder / _IDENTITY).unlink(missing_ok=True)
            for left in self.folder.glob("*.tmp"):
                left.unlink()
            os.replace(self.folder, final)
            publish.sync_directory(final.parent)
        except OSError as error:
            raise DataError(f"{final}: {error.strerror or error}") from error


def described(identity: Mapping[str, Any]) -> str:
    """Return an identity as text, the same for the same work."""
    return json.dumps(identity, sort_keys=True)


def identity_of(files: list[Path]) -> list[list[Any]]:
    """Return name, size and time of change of files: what tells one state of them from another."""
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in sorted(files)]


class DigestedFile:
    """A file that is hashed while it is written.

    Attributes:
        size: bytes written so far.
    """

    def __init__(self, path: Path) -> None:
        """Open for writing."""
        self._file = path.open("wb")
        self._digest = hashlib.sha256()
        self.size = 0

    def write(self, content: bytes | memoryview) -> None:
        """Write and hash."""
        self._file.write(content)
        self._digest.update(content)
        self.size += len(content)

    def close(self) -> tuple[int, str]:
        """Force the file to disk; return size and SHA-256."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self.size, self._digest.hexdigest()

    def abort(self) -> None:
        """Close without promise."""
        self._file.close()
