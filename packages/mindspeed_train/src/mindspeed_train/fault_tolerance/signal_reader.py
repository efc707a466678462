"""Signals answered at once, in a thread: the main thread may be inside a call that never returns.

Python runs a signal's handler between two of its own instructions, which a collective that waits for a lost
rank does not reach. The number of the signal is written into a pipe when it arrives.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress

_END = 0


class SignalReader:
    """Read signals as they arrive; for the main thread, which alone may install it."""

    def __init__(self, answer: Callable[[int], None]) -> None:
        """Prepare to call ``answer`` in a thread with the number of each signal that has a Python handler."""
        self._answer = answer
        self._reading, self._writing = os.pipe()
        # As `signal.set_wakeup_fd` wants it.
        os.set_blocking(self._writing, False)
        self._before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._read, name="mindspeed signals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Read no more, and put back who read before."""
        signal.set_wakeup_fd(self._before)
        with suppress(BlockingIOError):
            os.write(self._writing, bytes([_END]))
        self._thread.join(1.0)
        if not self._thread.is_alive():
            os.close(self._reading)
            os.close(self._writing)

    def _read(self) -> None:
        while True:
            for number in os.read(self._reading, 64):
                if number == _END:
                    return
                self._answer(number)
