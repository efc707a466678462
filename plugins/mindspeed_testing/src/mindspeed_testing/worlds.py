"""Worlds: a function run by several ranks on this machine, with torch and megatron imported only once.

A fork server imports the heavy modules once per program; every world after that costs a fork per rank instead
of an interpreter start. Whatever goes wrong in a world arrives in the parent as one `WorldError` that names
the rank and the reason, and no process of it survives.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

from mindspeed_core.discovery.entry_points import load_object
from mindspeed_testing.fork_server import adopt_parent_environment, fork_server

GRACE_SECONDS = 0.5
"""Time for the other ranks to report after the first failure, to find out which one caused the others."""

_SECONDARY = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "Connection was likely closed",
    "failed to recv, got 0 bytes",
)


@dataclass(frozen=True)
class RankFailure:
    """The failure of one rank.

    Attributes:
        rank: the rank.
        reason: one line.
        details: the traceback, or what the rank last printed.
        secondary: a consequence of another rank's failure (its connection was closed).
    """

    rank: int
    reason: str
    details: str = ""
    secondary: bool = False


class WorldError(RuntimeError):
    """A world failed; the message shows the rank that caused it, ``failures`` every rank that failed."""

    def __init__(self, failures: Sequence[RankFailure], world_size: int) -> None:
        """Put the cause first: the earliest failure that is no consequence of another one."""
        self.failures = tuple(sorted(failures, key=lambda failure: failure.secondary))
        self.world_size = world_size
        cause = self.failures[0]
        others = [str(failure.rank) for failure in self.failures[1:]]
        text = f"rank {cause.rank} of {world_size}: {cause.reason}"
        if others:
            text += f" (rank(s) {', '.join(sorted(others))} failed with it)"
        if cause.details:
            text += "\n" + cause.details.rstrip()
        super().__init__(text)

    @property
    def rank(self) -> int:
        """Return the rank that caused the failure."""
        return self.failures[0].rank


class WorldTimeout(WorldError):
    """Ranks did not finish in time; the message names them and shows where each one waits."""

    def __init__(self, failures: Sequence[RankFailure], world_size: int, seconds: float) -> None:
        """Name every rank that hangs."""
        super().__init__(failures, world_size)
        hanging = ", ".join(str(failure.rank) for failure in failures)
        places = "\n".join(f"--- rank {failure.rank}\n{failure.details.rstrip()}" for failure in failures)
        self.args = (f"no result after {seconds:g} s from rank(s) {hanging} of {world_size}\n{places}",)


def run_world(
    function: Callable[..., Any] | str,
    world_size: int,
    *args: Any,
    timeout: float = 300.0,
    env: Mapping[str, str] | None = None,
    show_output: bool = False,
    server: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run ``function(*args)`` on ``world_size`` ranks, each in its own process.

    Every child has this process's ``sys.path``, working directory and environment, one compute thread, and
    the variables of a torchrun launch (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``,
    ``MASTER_PORT``); the rendezvous store is served by this process, so that ``init_method="env://"`` needs
    no free port.

    Args:
        function: a module-level function, or ``"module:qualname"``.
        world_size: number of ranks.
        args: picklable arguments, the same for every rank.
        timeout: seconds after which ranks without result are killed.
        env: additional environment variables for the children.
        show_output: print what the ranks wrote to stdout and stderr; otherwise only a failure shows it.
        server: the environment variables of a fork server of its own, which all worlds that give the same
            share: where it imports what other worlds may not see, named in `FURTHER_IMPORTS`.

    Returns:
        The result of each rank, in rank order.

    Raises:
        WorldError: a rank raised, or died.
        WorldTimeout: ranks did not finish in time.
        ValueError: the function cannot be found by name in another process.
    """
    import torch.distributed as dist

    target = _target_name(function)
    payload = pickle.dumps(args)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="mindspeed-world-") as directory:
        world = _World(
            target, payload, world_size, int(store.port), env or {}, Path(directory), dict(server or {})
        )
        try:
            world.start()
            results = world.collect(timeout)
        finally:
            world.kill()
            if show_output:
                world.print_output()
    del store
    return results


def _target_name(function: Callable[..., Any] | str) -> str:
    if isinstance(function, str):
        if function.count(":") != 1:
            raise ValueError(f"world function {function!r}: write 'module:qualname'")
        return function
    module, name = function.__module__, function.__qualname__
    if "<" in name:
        raise ValueError(
            f"world function {name} of {module} is local to a function; ranks find it by name: move it to "
            "module level"
        )
    if module == "__main__":
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        path = getattr(main, "__file__", None)
        if spec is None and path is None:
            raise ValueError(f"world function {name} was typed into an interpreter; put it into a module")
        module = spec.name if spec is not None else Path(str(path)).stem
    return f"{module}:{name}"


@dataclass(eq=False)
class _Rank:
    """One child, as the parent sees it."""

    rank: int
    process: Any
    pipe: connection.Connection
    output: Path
    finished: bool = False

    def tail(self, lines: int = 40) -> str:
        if not self.output.exists():
            return ""
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-lines:])


@dataclass
class _World:
    """One run of a function on several ranks."""

    target: str
    payload: bytes
    size: int
    port: int
    env: Mapping[str, str]
    directory: Path
    server: Mapping[str, str]
    ranks: list[_Rank] = field(default_factory=list)

    def start(self) -> None:
        with fork_server(self.server) as context:
            for rank in range(self.size):
                parent_end, theirs = context.Pipe(duplex=True)
                output = self.directory / f"rank{rank}.txt"
                process = context.Process(
                    target=_child,
                    args=(self._setup(rank, str(output)), theirs),
                    name=f"mindspeed rank {rank}",
                    daemon=True,
                )
                process.start()
                theirs.close()
                self.ranks.append(_Rank(rank, process, parent_end, output))

    def _setup(self, rank: int, output: str) -> dict[str, Any]:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            # Makes every rank a client of the parent's store instead of rank 0 serving one.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            **self.env,
        }
        return {
            "target": self.target,
            "payload": self.payload,
            "environment": environment,
            "path": list(sys.path),
            "directory": os.getcwd(),
            "output": output,
        }

    def collect(self, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: list[RankFailure] = []
        deadline = time.monotonic() + timeout
        while len(results) + len(failures) < self.size:
            pending = [rank for rank in self.ranks if not rank.finished]
            pipes = {rank.pipe: rank for rank in pending}
            ready = connection.wait(list(pipes), max(0.0, deadline - time.monotonic()))
            if not ready:
                if failures:
                    break
                raise WorldTimeout([self._hanging(rank) for rank in pending], self.size, timeout)
            for pipe in ready:
                rank = pipes[pipe]  # type: ignore[index]
                rank.finished = True
                failure = self._receive(rank, results)
                if failure is not None:
                    if not failures:
                        deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                    failures.append(failure)
        if failures:
            raise WorldError(failures, self.size)
        for rank in self.ranks:
            rank.pipe.send_bytes(b"bye")
        for rank in self.ranks:
            rank.process.join(5.0)
        return [results[rank] for rank in range(self.size)]

    def _receive(self, rank: _Rank, results: dict[int, Any]) -> RankFailure | None:
        try:
            message = rank.pipe.recv_bytes()
        except (EOFError, ConnectionResetError):
            rank.process.join(5.0)
            return RankFailure(rank.rank, _exit_reason(rank.process.exitcode), rank.tail())
        # The bytes come from a child of this process over a private pipe.
        good, content = pickle.loads(message)  # noqa: S301
        if good:
            results[rank.rank] = content
            return None
        reason, details = content
        secondary = any(mark in details for mark in _SECONDARY)
        return RankFailure(rank.rank, reason, details, secondary)

    def _hanging(self, rank: _Rank) -> RankFailure:
        before = rank.output.stat().st_size if rank.output.exists() else 0
        # The rank may end by itself at this very moment.
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid, signal.SIGUSR2)
        connection.wait([rank.process.sentinel], 0.2)
        text = ""
        if rank.output.exists():
            with rank.output.open("rb") as file:
                file.seek(before)
                text = file.read().decode(errors="replace")
        return RankFailure(rank.rank, "hangs", text)

    def kill(self) -> None:
        for rank in self.ranks:
            if rank.process.is_alive():
                rank.process.kill()
        for rank in self.ranks:
            rank.process.join(5.0)
            rank.pipe.close()

    def print_output(self) -> None:
        for rank in self.ranks:
            for line in rank.tail(10_000).splitlines():
                print(f"[rank {rank.rank}] {line}")


def _exit_reason(code: int | None) -> str:
    if code is None:
        return "closed its connection without a result"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exited with status {code} without a result"


def _child(setup: dict[str, Any], pipe: connection.Connection) -> None:
    """Run one rank; never return, so that no interpreter shutdown waits for backend threads."""
    dismissed = threading.Event()
    threading.Thread(
        target=_watch_parent, args=(pipe, dismissed), name="mindspeed parent watch", daemon=True
    ).start()
    output = adopt_parent_environment(setup)
    faulthandler.register(signal.SIGUSR2, file=output, all_threads=False)
    # A rank is a daemon so that the program's end ends it; daemons may not fork, but writers of checkpoints
    # and workers of data loaders are forks.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    try:
        function = load_object(setup["target"])
        args = pickle.loads(setup["payload"])  # noqa: S301 - written by the parent of this process
        message = pickle.dumps((True, function(*args)))
    except BaseException as error:
        details = traceback.format_exc()
        if sys.version_info < (3, 11):
            details += "\n".join(getattr(error, "__notes__", ()))
        message = pickle.dumps((False, (f"{type(error).__name__}: {error}", details)))
    try:
        pipe.send_bytes(message)
    except OSError:
        _leave(1)
    # Peers may still communicate with this rank: its connections stay open until all are done.
    dismissed.wait()
    _leave(0)


def _leave(status: int) -> None:
    """End this process, and those that it has started: nobody else would end them."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(status)


def _watch_parent(pipe: connection.Connection, dismissed: threading.Event) -> None:
    """Wait until the parent says that every rank is done; end this process when the parent is gone."""
    try:
        pipe.recv_bytes()
    except (EOFError, OSError):
        _leave(1)
    dismissed.set()
