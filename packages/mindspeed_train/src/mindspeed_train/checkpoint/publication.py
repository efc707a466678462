"""Publishing beside training: rank 0 completes and renames a checkpoint whose files all ranks have written.

It forces files to disk and deletes old checkpoints, which takes longer than the steps that it would hold up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from mindspeed_train.checkpoint.collective import FAILURES


class Publication:
    """A checkpoint that is being published in a thread of rank 0; the other ranks have nothing to do."""

    def __init__(self, action: Callable[[], None] | None) -> None:
        """Start ``action``, which publishes, in a thread of its own; None where another rank publishes."""
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if action is not None:
            # A disk that hangs must not hold up the end of the process.
            self._thread = threading.Thread(
                target=self._run, args=(action,), name="mindspeed publishing", daemon=True
            )
            self._thread.start()

    def running(self) -> bool:
        """Return whether it has not ended."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> None:
        """Wait for its end, at most for so many seconds."""
        if self._thread is not None:
            self._thread.join(seconds)

    def result(self) -> None:
        """Wait for its end; raise the error that ended it."""
        self.wait()
        if self._error is not None:
            raise self._error

    @property
    def failed(self) -> bool:
        """Return whether an error has ended it."""
        return self._error is not None

    def _run(self, action: Callable[[], None]) -> None:
        try:
            action()
        except FAILURES as error:
            self._error = error
