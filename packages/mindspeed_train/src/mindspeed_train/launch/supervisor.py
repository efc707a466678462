"""Supervisor of workers: starts them, forwards signals, finds the first failure, restarts all of them.

The workers of one run live and die together: a collective cannot go on without one of them. Whatever ends
them is one message. That a worker hangs is seen from here, by their pulses: no rank depends on another to be
found.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from mindspeed_megatron.launch import environment, hang
from mindspeed_train.output import say

GRACE_SECONDS = 5.0
"""Time for the other workers to report when one only noticed another's failure."""
EXIT_PROBLEMS = 1
EXIT_INTERRUPTED = 130
"""Of a worker that saved after Ctrl-C."""
ONE_PRESS_SECONDS = 0.3
"""Ctrl-C may arrive twice: from the terminal, and from a program that passes it on."""
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


@dataclass(frozen=True)
class WorkerSetup:
    """The environment and the descriptors a worker is started with.

    Attributes:
        environment: variables to set.
        keep: descriptors it inherits.
        close: descriptors of the supervisor that a fork closes.
    """

    environment: Mapping[str, str]
    keep: tuple[int, ...]
    close: tuple[int, ...]


@dataclass(frozen=True)
class Cause:
    """The cause of a failed attempt.

    Attributes:
        rank: the worker that failed first.
        kind: see `worker.send_message`; ``killed`` for a signal, ``silent`` for an exit without a word.
        text: what it said.
        status: exit status of the job.
    """

    rank: int
    kind: str
    text: str
    status: int = EXIT_PROBLEMS

    @property
    def worth_a_restart(self) -> bool:
        """Return whether a restart could succeed; not after what the user has to put right."""
        return self.kind not in ("explained", "exit")


@dataclass
class _Worker:
    rank: int
    pid: int
    pipe: int
    pulse: int
    received: bytes = b""
    status: int | None = None
    ended: float = 0.0

    def message(self) -> dict[str, Any] | None:
        line, newline, _ = self.received.partition(b"\n")
        return json.loads(line) if newline else None


class Supervisor:
    """One job with a number of workers on this machine."""

    def __init__(
        self,
        start: Callable[[WorkerSetup], int],
        count: int,
        restarts: int,
        last_words: Callable[[], str] = str,
    ) -> None:
        """Describe the job.

        Args:
            start: starts a worker and returns its process id.
            count: workers.
            restarts: how often all of them may be started again.
            last_words: returns what is printed last where the workers did not end by themselves.
        """
        self._start = start
        self._last_words = last_words
        self.count = count
        self.restarts = restarts
        self._job = environment.own_job()
        self._stopping = 0
        self._since = 0.0
        self._interrupted = False
        self._workers: list[_Worker] = []
        self._killed_by_us = False

    def run(self) -> int:
        """Run the job to its end; the exit status."""
        wake_read, wake_write = os.pipe()
        life_read, life_write = os.pipe()
        for descriptor in (wake_read, wake_write):
            os.set_blocking(descriptor, False)
        # What is ignored stays so: SIGHUP under nohup, SIGINT of a command in the background.
        heeded = [number for number in FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._forward) for number in heeded}
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, _notice)
        old_wakeup = signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        descriptors = (wake_read, wake_write, life_write)
        try:
            return self._run(wake_read, life_read, descriptors)
        finally:
            self._kill()
            signal.set_wakeup_fd(old_wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            for descriptor in (*descriptors, life_read):
                os.close(descriptor)

    def _run(self, wake: int, life: int, descriptors: tuple[int, ...]) -> int:
        restart = 0
        while True:
            self._begin(restart, life, descriptors)
            cause = self._watch(wake)
            if cause is None:
                return EXIT_INTERRUPTED if self._interrupted else 0
            if self._stopping:
                if cause.kind == "hang":
                    self._print_cause(cause, restart)
                # Workers that were still starting have nothing to save and die of the signal.
                say(f"stopped by {signal.Signals(self._stopping).name}")
                self._print_last_words()
                return 128 + self._stopping
            if not cause.worth_a_restart or restart == self.restarts:
                self._print_cause(cause, restart)
                self._print_last_words(cause.text)
                return cause.status
            restart += 1
            say(
                f"{self._who(cause)} {_headline(cause)}; starting the workers again from the last checkpoint "
                f"({restart} of --max-restarts {self.restarts})"
            )

    def _begin(self, restart: int, life: int, descriptors: tuple[int, ...]) -> None:
        self._workers, self._killed_by_us = [], False
        with socket.create_server(("127.0.0.1", 0), backlog=max(128, self.count)) as listener:
            for rank in range(self.count):
                reading, writing = os.pipe()
                hearing, telling = os.pipe()
                # Its watch must not wait for a supervisor that reads nothing.
                os.set_blocking(telling, False)
                variables = {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(self.count),
                    "LOCAL_WORLD_SIZE": str(self.count),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(listener.getsockname()[1]),
                    **environment.within_one_machine(),
                    environment.SUPERVISOR: f"{writing},{life},{telling}",
                    environment.JOB: self._job.name,
                    environment.RESTART: str(self._job.restart + restart),
                }
                keep: tuple[int, ...] = (writing, life, telling)
                if rank == 0 and self.count > 1:
                    variables[environment.STORE] = str(listener.fileno())
                    keep = (*keep, listener.fileno())
                others = tuple(pipe for worker in self._workers for pipe in (worker.pipe, worker.pulse))
                unused = () if rank == 0 else (listener.fileno(),)
                setup = WorkerSetup(variables, keep, (*descriptors, *others, reading, hearing, *unused))
                pid = self._start(setup)
                for descriptor in (writing, telling):
                    os.close(descriptor)
                for descriptor in (reading, hearing):
                    os.set_blocking(descriptor, False)
                self._workers.append(_Worker(rank, pid, reading, hearing))
                if self._stopping:
                    self._send(self._stopping)

    def _watch(self, wake: int) -> Cause | None:
        """Wait until every worker has ended; None when all did well."""
        workers = self._workers
        deadline: float | None = None
        hanging: Cause | None = None
        suspected = False
        pulses = hang.Pulses({worker.rank: worker.pid for worker in workers})
        with selectors.DefaultSelector() as selector:
            selector.register(wake, selectors.EVENT_READ, None)
            for worker in workers:
                selector.register(worker.pipe, selectors.EVENT_READ, worker)
                selector.register(worker.pulse, selectors.EVENT_READ, worker)
            while any(worker.status is None for worker in workers):
                timeout = 0.0 if suspected else pulses.period
                if deadline is not None:
                    timeout = max(0.0, deadline - time.monotonic())
                _read(selector, timeout, pulses)
                pulses.look()
                self._reap()
                for worker in workers:
                    if worker.status is not None:
                        pulses.end(worker.rank)
                failed = [worker for worker in workers if worker.status]
                if failed and deadline is None:
                    certain = any(_cause(worker).kind not in _UNCERTAIN for worker in failed)
                    deadline = time.monotonic() + (0.0 if certain and not self._stopping else GRACE_SECONDS)
                if deadline is not None:
                    if time.monotonic() >= deadline:
                        self._kill()
                    continue
                found = pulses.finding()
                if found is not None and suspected:
                    hanging = Cause(found.rank, "hang", hang.message(found, pulses.limit, pulses.step))
                    self._kill()
                # This process may have been stopped itself: what came meanwhile is read first.
                suspected = found is not None
        return self._outcome(hanging)

    def _outcome(self, hanging: Cause | None) -> Cause | None:
        """Close the pipes of workers that have ended, and return why they did; None when all did well."""
        for worker in self._workers:
            worker.received += _drain(worker.pipe)
            os.close(worker.pipe)
            os.close(worker.pulse)
        failed = sorted((worker for worker in self._workers if worker.status), key=lambda one: one.ended)
        if hanging is not None or not failed:
            return hanging
        return min((_cause(worker) for worker in failed), key=lambda cause: _ORDER.index(cause.kind))

    def _reap(self) -> None:
        for worker in self._workers:
            if worker.status is not None:
                continue
            pid, status = os.waitpid(worker.pid, os.WNOHANG)
            if pid:
                worker.status = os.waitstatus_to_exitcode(status)
                worker.ended = time.monotonic()
                if self._killed_by_us and worker.status == -signal.SIGKILL:
                    # It was well until its peers failed.
                    worker.status = 0
                if worker.status == EXIT_INTERRUPTED and worker.message() is None:
                    worker.status, self._interrupted = 0, True
                # What it started (data loaders, writers of a checkpoint) has nobody to work for.
                if worker.status:
                    _signal_group(worker.pid, signal.SIGKILL)

    def _kill(self) -> None:
        self._killed_by_us = True
        for worker in self._workers:
            if worker.status is None:
                _signal_group(worker.pid, signal.SIGKILL)
        for worker in self._workers:
            if worker.status is None:
                with suppress(ChildProcessError):
                    os.waitpid(worker.pid, 0)
                worker.status = 0

    def _forward(self, number: int, frame: FrameType | None) -> None:
        again = bool(self._stopping) and number in (signal.SIGINT, signal.SIGTERM)
        if again and time.monotonic() - self._since < ONE_PRESS_SECONDS:
            return
        if not self._stopping:
            self._stopping, self._since = number, time.monotonic()
        self._send(signal.SIGKILL if again else number)

    def _send(self, number: int) -> None:
        for worker in self._workers:
            if worker.status is None:
                with suppress(ProcessLookupError):
                    os.kill(worker.pid, number)

    def _who(self, cause: Cause) -> str:
        return f"rank {cause.rank} of {self.count}"

    def _print_last_words(self, said: str = "") -> None:
        words = self._last_words()
        # The last of the lines, which a worker may have said.
        if words and not said.rstrip().endswith(words.rpartition("\n")[2]):
            say(words)

    def _print_cause(self, cause: Cause, restart: int) -> None:
        if cause.kind == "exit":
            return
        if cause.kind in ("killed", "silent"):
            spent = f"; --max-restarts {self.restarts} are used up" if restart else ""
            say(f"error: {self._who(cause)} {_headline(cause)}{spent}")
            return
        if self.count > 1:
            say(f"{self._who(cause)}:")
        say(cause.text.rstrip())


_ORDER = ("hang", "killed", "explained", "unexpected", "exit", "silent", "consequence")
"""Kinds of failure from cause to consequence: a worker that hangs or was killed explains all others, one that
only noticed a closed connection explains nothing."""
_UNCERTAIN = ("exit", "silent", "consequence")
"""Kinds after which the other workers get time to end by themselves, or to name the cause."""


def _cause(worker: _Worker) -> Cause:
    assert worker.status
    message = worker.message()
    if message is not None:
        rank = int(message.get("rank", worker.rank))
        status = int(message.get("status", EXIT_PROBLEMS))
        return Cause(rank, str(message["kind"]), str(message["text"]), status)
    if worker.status < 0:
        name = signal.Signals(-worker.status).name
        why = " (by hand, or by the system for lack of memory)" if name == "SIGKILL" else ""
        return Cause(worker.rank, "killed", f"was killed by {name}{why}")
    return Cause(worker.rank, "silent", f"ended with status {worker.status} without a message")


def _headline(cause: Cause) -> str:
    if cause.kind in ("killed", "silent"):
        return cause.text
    lines = [line for line in cause.text.splitlines() if line.strip()] or [cause.kind]
    if not lines[0].startswith("Traceback"):
        return f"failed: {lines[0].strip().removeprefix('error: ')}"
    # Below the frames of a traceback is its error, and then perhaps notes, of which some are indented too.
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    below = lines[frames[-1] + 1 :] if frames else lines[1:]
    return f"failed: {next((line for line in below if not line.startswith(' ')), lines[-1]).strip()}"


def _read(selector: selectors.BaseSelector, timeout: float | None, pulses: hang.Pulses) -> None:
    """Take what the workers say, and the signals that woke this process."""
    for key, _ in selector.select(timeout):
        data, worker = _drain(key.fd), key.data
        if worker is None:
            continue
        if key.fd == worker.pulse:
            pulses.hear(worker.rank, data)
        else:
            worker.received += data
        if not data:
            selector.unregister(key.fd)


def _drain(descriptor: int) -> bytes:
    data = b""
    with suppress(BlockingIOError):
        while chunk := os.read(descriptor, 65536):
            data += chunk
    return data


def _signal_group(pid: int, number: int) -> None:
    for send in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            send(pid, number)


def _notice(number: int, frame: FrameType | None) -> None:
    """Do nothing: only the descriptor that signals wake matters."""
