"""Deadlines of connections: a client that sends a byte now and then does not hold a thread for ever.

Timeouts of sockets count from byte to byte. Here one thread ends the reading side of connections whose
request has not arrived as a whole in time.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress


class Deadlines:
    """Connections and the time until which their request must have arrived."""

    def __init__(self) -> None:
        """Start the thread that watches."""
        self._until: dict[socket.socket, float] = {}
        self._missed: set[socket.socket] = set()
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._watch, name="deadlines", daemon=True)
        self._thread.start()

    def begin(self, connection: socket.socket, seconds: float) -> None:
        """Let a connection have so many seconds from now."""
        with self._changed:
            self._until[connection] = time.monotonic() + seconds
            self._changed.notify()

    def end(self, connection: socket.socket) -> bool:
        """Forget a connection; returns whether it was too late."""
        with self._changed:
            self._until.pop(connection, None)
            late = connection in self._missed
            self._missed.discard(connection)
            return late

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join()

    def _watch(self) -> None:
        with self._changed:
            while not self._ended:
                now = time.monotonic()
                for connection in [each for each, until in self._until.items() if until <= now]:
                    del self._until[connection]
                    self._missed.add(connection)
                    # The thread that reads finds the end of the stream, and can still answer.
                    with suppress(OSError):
                        connection.shutdown(socket.SHUT_RD)
                nearest = min(self._until.values(), default=None)
                self._changed.wait(None if nearest is None else max(0.0, nearest - time.monotonic()))
