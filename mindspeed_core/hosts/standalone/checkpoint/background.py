"""A forked process that does one piece of work beside training, and how it ended.

The trainer never waits for it without a bound: a process that was killed, crashed, or stopped making progress
is noticed at the next look, whatever it was doing. Its outcome comes through a pipe and counts only when the
process has ended by itself, so nothing half-done is ever taken for a result.
"""

from __future__ import annotations

import gc
import mmap
import os
import pickle
import select
import signal
import time
from collections.abc import Callable
from typing import Any, NoReturn

from mindspeed_core.hosts.standalone.checkpoint.forking import die_with_parent

Beat = Callable[[], None]
"""Called by the work whenever it has got further."""

_REAP_SECONDS = 5.0
_LOOK_SECONDS = 0.05
_CHUNK = 1 << 20


class WorkerLost(Exception):
    """The process ended, or was ended, before its work was done; the message names it and how."""


class BackgroundWork:
    """Work in a forked process.

    The child is a fork beside the threads of the trainer: the work must not use the process group, the
    device, or memory that `kept_out_of_forks` keeps from it.
    """

    def __init__(self, work: Callable[[Beat], Any], *, limit: float, explain: Callable[[BaseException], str]):
        """Start it.

        Args:
            work: what the child does; its result is pickled. It calls its argument whenever it gets further.
            limit: seconds without progress after which the process is killed.
            explain: from an exception of the work to one phrase.
        """
        self._limit = limit
        self._beats = mmap.mmap(-1, 8)
        self._received = bytearray()
        self._lost = ""
        self._result: Any = None
        self._ended = False
        self._since = time.monotonic()
        self.progress = -1
        reader, writer = os.pipe()
        trainer = os.getpid()
        pid = os.fork()
        if pid == 0:
            _work_and_exit(work, self._beats, reader, writer, trainer, explain)
        self.pid = pid
        os.close(writer)
        os.set_blocking(reader, False)
        self._reader = reader

    def running(self) -> bool:
        """Look at the process without waiting; kill it where it has made no progress for too long."""
        if self._ended:
            return False
        status = self._exit_status()
        self._receive()
        if status is not None:
            self._end(_describe(status))
            return False
        # A result that is longer than a pipe holds leaves in pieces.
        progress = int.from_bytes(self._beats[:8], "little") + len(self._received)
        if progress != self.progress:
            self.progress, self._since = progress, time.monotonic()
        if time.monotonic() - self._since <= self._limit:
            return True
        self.kill(f"made no progress for {self._limit:g} s and was killed")
        return False

    def wait(self, seconds: float) -> None:
        """Wait for the end, at most for so many seconds."""
        if not self._ended:
            select.select([self._reader], [], [], seconds)

    @property
    def failed(self) -> bool:
        """Return whether the process has ended without a result."""
        return bool(self._lost)

    def result(self) -> Any:
        """Return the result of the work, which has ended.

        Raises:
            WorkerLost: the process did not get to its end, or the work failed.
        """
        if self._lost:
            raise WorkerLost(self._lost)
        return self._result

    def kill(self, why: str = "was not needed any more") -> None:
        """End the process, also where it is stopped; nothing where it has ended."""
        if self._ended:
            return
        os.kill(self.pid, signal.SIGKILL)
        end = time.monotonic() + _REAP_SECONDS
        # One that hangs inside the kernel does not die at once, and must not hang the trainer.
        while self._exit_status() is None and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
        self._end(why)

    def _exit_status(self) -> int | None:
        try:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            # Somebody else reaped it; a complete result still counts.
            return 0
        return os.waitstatus_to_exitcode(status) if pid else None

    def _receive(self) -> None:
        try:
            while chunk := os.read(self._reader, _CHUNK):
                self._received += chunk
        except BlockingIOError:
            pass

    def _end(self, lost: str) -> None:
        self._receive()
        os.close(self._reader)
        self._ended = True
        if not lost and not self._received:
            lost = "ended without a result"
        if lost:
            self._lost = f"the process that wrote in the background (process {self.pid}) {lost}"
        else:
            # Written by our own child, and complete since that ended well.
            reason, self._result = pickle.loads(bytes(self._received))  # noqa: S301
            self._lost = reason or ""


def _describe(status: int) -> str:
    if status == 0:
        return ""
    if status > 0:
        return f"ended with exit code {status} before it was done"
    cause = "; the kernel does so when memory runs out" if status == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-status).name} before it was done{cause}"


def _work_and_exit(
    work: Callable[[Beat], Any],
    beats: mmap.mmap,
    reader: int,
    writer: int,
    trainer: int,
    explain: Callable[[BaseException], str],
) -> NoReturn:
    status = 1
    try:
        # A collection could free what belongs to the trainer's device.
        gc.disable()
        die_with_parent(trainer)
        # The trainer decides what its signals mean; a save that is under way is finished.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        os.close(reader)

        def beat() -> None:
            beats[:8] = (int.from_bytes(beats[:8], "little") + 1).to_bytes(8, "little")

        try:
            outcome: tuple[str | None, Any] = (None, work(beat))
        except BaseException as error:
            outcome = (explain(error), None)
        message = memoryview(pickle.dumps(outcome))
        while message:
            message = message[os.write(writer, message) :]
        status = 0
    finally:
        os._exit(status)
