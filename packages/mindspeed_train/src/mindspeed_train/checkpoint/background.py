"""A process beside training that does one piece of work at a time, and how each piece ended.

The trainer never waits for it without a bound: a process that was killed, crashed, or stopped making progress
is noticed at the next look, whatever it was doing. It is a new interpreter and no fork: a fork takes as long
as the trainer is large, and makes each page that the trainer writes afterwards a fault and a copy. What is
large goes over in shared memory. A piece of work counts only when its outcome has arrived whole.
"""

from __future__ import annotations

import json
import logging
import marshal
import mmap
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from mindspeed_megatron.launch.hang import is_stopped
from mindspeed_train.checkpoint.background_main import IGNORED, MEMORY_BEGIN
from mindspeed_train.checkpoint.processes import CoreTime, core_time_of
from mindspeed_train.checkpoint.reasons import WorkerLost, reason_of

logger = logging.getLogger("mindspeed_core")

Beat = Callable[[], None]
"""Called by the work whenever it has got further."""

_REAP_SECONDS = 5.0
_NOTICE_SECONDS = 10.0
"""Without progress, after which a process is named; its limit ends it later."""
_CHUNK = 1 << 20
_PROGRAM = (
    "import sys; work, memory, trainer, *sys.path[:] = sys.argv[1:]; "
    "from mindspeed_train.checkpoint.background_main import serve; "
    "serve(work, int(memory), int(trainer))"
)


class BackgroundProcess:
    """A process that does one kind of work; it starts with the first piece, and anew once it was lost.

    Attributes:
        progress: grows while the process gets further with its piece of work.
    """

    def __init__(self, work: str, *, limit: float) -> None:
        """Start nothing yet.

        Args:
            work: ``module:function`` that the process imports and calls with a job, the shared memory as a
                ``memoryview`` and a `Beat`; it returns what JSON can express.
            limit: seconds without progress after which the process is killed; those in which it gets no core
                do not count.
        """
        self._work, self._limit = work, limit
        self._memory = _shared_memory()
        self._size = MEMORY_BEGIN
        os.ftruncate(self._memory, self._size)
        self._beats = mmap.mmap(self._memory, MEMORY_BEGIN)
        self._process: subprocess.Popen[bytes] | None = None
        self._preparing: threading.Thread | None = None
        self._received = bytearray()
        self._outcome: dict[str, Any] | None = None
        self._lost = ""
        self._looked = self._stalled = 0.0
        self._cores = CoreTime()
        self._finished = threading.Event()
        self.progress = -1

    @property
    def pid(self) -> int | None:
        """Return the id of the process; None where none was started."""
        return None if self._process is None else self._process.pid

    def share(self, size: int) -> mmap.mmap:
        """Return memory that the process sees too, from `MEMORY_BEGIN` of it on."""
        self._size = max(self._size, MEMORY_BEGIN + size)
        os.ftruncate(self._memory, self._size)
        shared = mmap.mmap(self._memory, MEMORY_BEGIN + size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Fewer faults and faster copies, where the kernel has such pages for shared memory.
            with suppress(OSError):
                shared.madvise(mmap.MADV_HUGEPAGE)
        return shared

    def start(self, job: dict[str, Any], prepare: Callable[[], None] | None = None) -> None:
        """Begin a piece of work; the one before has ended.

        Args:
            job: what the work gets: strings, numbers, bytes, lists, tuples and dictionaries.
            prepare: fills the shared memory; runs in a thread, and the work begins after it.

        Raises:
            OSError: no process can be started.
        """
        self._outcome, self._lost, self.progress = None, "", -1
        self._received.clear()
        if self._process is None or self._process.poll() is not None:
            self._close_process()
            self._process = self._spawn()
        self._looked, self._stalled = time.monotonic(), 0.0
        self._cores = core_time_of(self._process.pid)
        self._finished.set()
        self._finished = threading.Event()
        # Looks only happen between two steps, which may take long.
        threading.Thread(
            target=self._notice_stall,
            args=(self._process.pid, self._finished),
            name="mindspeed writer watch",
            daemon=True,
        ).start()
        # Of plain types alone. A pipe would make a trainer wait for a process that reads slowly.
        content = marshal.dumps(job)
        os.ftruncate(self._memory, self._size + len(content))
        view, at = memoryview(content), self._size
        while view:
            written = os.pwrite(self._memory, view, at)
            view, at = view[written:], at + written
        line = f"{self._size} {len(content)}\n".encode()
        if prepare is None:
            self._send(line)
        else:
            self._preparing = threading.Thread(
                target=self._prepare, args=(prepare, line), name="mindspeed staging", daemon=True
            )
            self._preparing.start()

    def running(self) -> bool:
        """Look at the work without waiting; kill its process where it has made no progress for too long."""
        if self._ended:
            return False
        assert self._process is not None
        if self._preparing is not None:
            if self._preparing.is_alive():
                return True
            self._preparing, self._looked = None, time.monotonic()
            if self._ended:
                return False
        status = self._process.poll()
        self._receive()
        if self._outcome is not None:
            self._finished.set()
            return False
        if status is not None:
            self._lose(_describe(status))
            return False
        # A result that is longer than a pipe holds leaves in pieces.
        progress = self._beaten() + len(self._received)
        self._count_stall(self._process.pid, progress != self.progress)
        self.progress = progress
        if self._stalled <= self._limit:
            return True
        self.kill(f"made no progress for {self._limit:g} s and was killed")
        return False

    def _count_stall(self, pid: int, moved: bool) -> None:
        """Add the time since the last look, but for what the process spent in the queue for a core.

        At the lowest priority that may be long, and is no hanging.
        """
        now, cores, before = time.monotonic(), core_time_of(pid), self._cores
        passed, self._looked, self._cores = now - self._looked, now, cores
        if moved:
            self._stalled = 0.0
        else:
            self._stalled += _without_reason(passed, before, cores)

    def _notice_stall(self, pid: int, finished: threading.Event) -> None:
        """Say once that the process makes no progress, long before its limit ends it; runs in a thread."""
        after = min(_NOTICE_SECONDS, self._limit / 2)
        before, stalled, cores, looked = -1, 0.0, core_time_of(pid), time.monotonic()
        while not finished.wait(after / 5):
            now, had, preparing = time.monotonic(), core_time_of(pid), self._preparing
            try:
                progress = self._beaten()
            except ValueError:
                return  # closed a moment ago
            if progress != before or (preparing is not None and preparing.is_alive()):
                stalled = 0.0
            else:
                stalled += _without_reason(now - looked, cores, had)
            before, cores, looked = progress, had, now
            if stalled >= after:
                state = " (it is stopped by a signal)" if is_stopped(pid) else ""
                logger.warning(
                    "the process that writes in the background (process %d) made no progress for %.0f s%s; "
                    "it is killed after %g s, and its save fails then",
                    *(pid, stalled, state, self._limit),
                )
                return

    def _beaten(self) -> int:
        return int.from_bytes(self._beats[:8], "little")

    def wait(self, seconds: float) -> None:
        """Wait for the end of the work, at most for so many seconds."""
        if self._ended:
            return
        if self._preparing is not None:
            self._preparing.join(seconds)
            return
        assert self._process is not None
        assert self._process.stdout is not None
        select.select([self._process.stdout], [], [], seconds)

    @property
    def failed(self) -> bool:
        """Return whether the work has ended without a result."""
        return bool(self._lost)

    def result(self) -> Any:
        """Return the result of the work, which has ended.

        Raises:
            WorkerLost: the process did not get to its end, or the work failed.
        """
        if self._lost:
            raise WorkerLost(self._lost)
        assert self._outcome is not None
        return self._outcome["result"]

    def kill(self, why: str = "was not needed any more") -> None:
        """End the process, also where it is stopped; the next piece of work starts another."""
        self._finished.set()
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
        if self._process is not None:
            self._process.kill()
            # One that hangs inside the kernel does not die at once, and must not hang the trainer.
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_REAP_SECONDS)
        if not self._ended:
            self._lose(why)
        self._close_process()

    def close(self) -> None:
        """End the process and give up the shared memory; this object is not used any more."""
        self.kill()
        self._beats.close()
        os.close(self._memory)

    @property
    def _ended(self) -> bool:
        return self._process is None or self._outcome is not None or bool(self._lost)

    def _spawn(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", _PROGRAM]  # type: ignore[attr-defined]
        # What arrives before the process ignores it would end it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
        try:
            process = subprocess.Popen(
                [*command, self._work, str(self._memory), str(os.getpid()), *sys.path],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[self._memory],
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        return process

    def _prepare(self, prepare: Callable[[], None], line: bytes) -> None:
        try:
            prepare()
        except Exception as error:
            self._lost = reason_of(error)
        else:
            self._send(line)

    def _send(self, line: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        # One that was killed a moment ago is found at the next look.
        with suppress(BrokenPipeError):
            self._process.stdin.write(line)

    def _receive(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        while chunk := self._process.stdout.read(_CHUNK):
            self._received += chunk
        if self._received.endswith(b"\n"):
            outcome = json.loads(self._received)
            self._outcome, self._lost = outcome, outcome["reason"] or ""

    def _lose(self, how: str) -> None:
        self._finished.set()
        self._lost = f"the process that wrote in the background (process {self.pid}) {how}"

    def _close_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()


def _without_reason(passed: float, before: CoreTime, now: CoreTime) -> float:
    """Return the seconds of those that passed in which a process did not wait for a core."""
    if now.is_ready and now.ran == before.ran:
        # The kernel counts a wait when it ends.
        return 0.0
    return max(0.0, passed - (now.queued - before.queued) / 1e9)


def _shared_memory() -> int:
    """Return the descriptor of a file without a name, in memory where the system can."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("mindspeed background")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _describe(status: int) -> str:
    if status == 0:
        return "ended without a result"
    if status > 0:
        return f"ended with exit code {status} before it was done"
    cause = "; the kernel does so when memory runs out" if status == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-status).name} before it was done{cause}"
