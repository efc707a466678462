"""Failures of what a run writes for people (records, lines, charts, reports): told once, then spared.

A full disk or a closed terminal is no reason to lose a training. What a run needs to go on later, its
checkpoints, is written elsewhere and fails loudly.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("mindspeed_core")


class SparedFailures:
    """The failures of one session that were told; one line for each kind."""

    def __init__(self) -> None:
        """Begin with none."""
        self._told: set[str] = set()

    def tell(self, kind: str, error: BaseException) -> None:
        """Warn of a failure, unless one of its kind was told.

        Args:
            kind: what cannot be written, such as the flag and its folder; begins the message.
            error: why.
        """
        if kind in self._told:
            return
        self._told.add(kind)
        logger.warning(
            "%s: %s; training goes on, and what cannot be written is missing", kind, _reason(error)
        )

    def say(self, text: str) -> None:
        """Print a text, where standard output can take it."""
        try:
            print(text, flush=True)
        except (OSError, ValueError) as error:
            self.tell("standard output", error)

    @contextmanager
    def spare(self, kind: str) -> Iterator[None]:
        """Tell a failure of the file system in a ``with`` block instead of raising it."""
        try:
            yield
        except OSError as error:
            self.tell(kind, error)


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno:
        where = f" ({error.filename})" if error.filename else ""
        return f"{os.strerror(error.errno)}{where}"
    return f"{type(error).__name__}: {error}"
