"""A file of JSON lines, each whole: where the disk is full it ends, and training goes on."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mindspeed_megatron.earlier_files import move_aside

logger = logging.getLogger(__name__)


class LinesFile:
    """A file that lines are added to until one cannot be written.

    Attributes:
        closed: nothing is added any more.
    """

    def __init__(self, path: Path, flag: str) -> None:
        """Make the file; one that is there is moved aside.

        Args:
            path: of the file.
            flag: that names it, for the warning.
        """
        self._path, self._flag = path, flag
        self.closed = True
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            move_aside(path.parent, [path.name])
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            self._warn(error)
            return
        self.closed = False

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line; after the first that cannot be written, which is taken back, nothing is added."""
        if self.closed:
            return
        rest = json.dumps(dict(line)).encode() + b"\n"
        size = os.fstat(self._descriptor).st_size
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._descriptor, size)
            self._warn(error)
            self.close()

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self.closed = True
            os.close(self._descriptor)

    def _warn(self, error: OSError) -> None:
        logger.warning(
            "%s: %s cannot be written (%s); training goes on without the rest",
            self._flag,
            self._path,
            error.strerror,
        )
