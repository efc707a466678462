"""The file with a rank's history of allocations: written at the end, when a step fails, and now and then."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mindspeed_core.platforms.platform import Platform

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 60.0
"""At least between two writings in a run: a long history takes seconds."""


def history_path(path: str, rank: int) -> Path:
    """Return the file of a rank: ``snapshot_3.pickle`` for ``snapshot.pickle``, as Megatron-LM names it."""
    whole = Path(path)
    return whole.with_name(f"{whole.stem}_{rank}{whole.suffix}")


class MemoryHistoryFile:
    """Records from its making on.

    Attributes:
        path: of the file.
    """

    def __init__(self, platform: Platform, path: str, rank: int) -> None:
        """Start to record."""
        self.path = history_path(path, rank)
        self._platform = platform
        self._rank = rank
        self._written = time.monotonic()
        platform.record_memory()

    def write(self) -> None:
        """Write the history; where that fails training goes on with a warning."""
        try:
            self._platform.memory_snapshot(self.path)
        except OSError as error:
            logger.warning("--memory-snapshot-path %s: %s; training goes on without it", self.path, error)
        self._written = time.monotonic()

    def write_now_and_then(self) -> None:
        """Write the history unless it was written a moment ago."""
        if time.monotonic() - self._written >= PAUSE_SECONDS:
            self.write()

    def close(self) -> None:
        """Write the history and record no more."""
        self.write()
        self._platform.record_memory(entries=0)
        logger.info("rank %d: history of allocations in %s", self._rank, self.path)
