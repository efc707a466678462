"""Publishing beside training: rank 0 completes and renames a checkpoint whose files all ranks have written.

It forces files to disk and deletes old checkpoints, which takes longer than the steps that it would hold up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from mindspeed_core.hosts.standalone.checkpoint.collective import FAILURES


class Publication:
    """A checkpoint that is being published in a thread; without an action, by another rank."""

    def __init__(self, action: Callable[[], None] | None) -> None:
        """Start ``action``, which publishes, in a thread of its own."""
        self._error: BaseException | None = None
        self._action = action
        # A disk that hangs must not hold up the end of the process.
        self._thread = threading.Thread(target=self._run, name="mindspeed publishing", daemon=True)
        self._thread.start()

    def running(self) -> bool:
        """Return whether it has not ended."""
        return self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> None:
        """Wait for its end, at most for so many seconds."""
        self._thread.join(seconds)

    def result(self) -> None:
        """Raise the error that ended it."""
        self.wait()
        if self._error is not None:
            raise self._error

    def succeeded(self) -> bool:
        """Wait for its end; return whether the checkpoint is published, as far as this rank publishes it."""
        self.wait()
        return self._error is None

    def _run(self) -> None:
        try:
            if self._action is not None:
                self._action()
        except FAILURES as error:
            self._error = error
