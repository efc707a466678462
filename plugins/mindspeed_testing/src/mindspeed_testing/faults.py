"""A training job that tests disturb, started as a user starts it, and what it printed and recorded."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

from mindspeed_testing.fork_server import adopt_parent_environment, fork_server_process

_STEP = re.compile(r"^step +(\d+)/\d+ \| loss (\S+) \|.*?grad norm (\S+)", re.MULTILINE)
_START = re.compile(r"^training from (?:step (\d+)|scratch)", re.MULTILINE)
_LOOK_SECONDS = 0.02


@dataclass
class Job:
    """A running ``mindspeed-train --nproc``: its supervisor, and the file that takes what it prints."""

    process: _Program
    output: Path

    def workers(self) -> list[psutil.Process]:
        """Return the worker processes that live now, by process id."""
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children()
            return sorted((child for child in children if _lives(child)), key=lambda child: child.pid)
        return []

    def text(self) -> str:
        """Return everything printed so far."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def pause(self, seconds: float) -> bool:
        """Let the job run on; False when it has ended."""
        return self.process.wait(seconds) is None

    def wait_for(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Wait until the condition holds.

        Raises:
            AssertionError: the job ended first, or it took too long; with what the job printed.
        """
        end = time.monotonic() + seconds
        while not condition():
            running = self.pause(_LOOK_SECONDS)
            if not running and not condition():
                raise self._ended(self.process.wait(0))
            if time.monotonic() > end:
                raise AssertionError(f"nothing happened for {seconds:g} s:\n{self.text()[-4000:]}")

    def starts(self) -> list[int]:
        """Return the step from which each attempt trained."""
        return [int(step or 0) for step in _START.findall(self.text())]

    def end(self, seconds: float = 60.0) -> int:
        """Wait for the end; the exit status."""
        status = self.process.wait(seconds)
        if status is None:
            self.close()
            raise AssertionError(f"the job did not end within {seconds:g} s:\n{self.text()[-4000:]}")
        return status

    def end_well(self, seconds: float = 60.0) -> None:
        """Wait for the end.

        Raises:
            AssertionError: the exit status is not 0; with what the job printed.
        """
        if status := self.end(seconds):
            raise self._ended(status)

    def _ended(self, status: int | None) -> AssertionError:
        return AssertionError(f"the job ended with {status}:\n{self.text()[-4000:]}")

    def close(self) -> None:
        """End the job and everything it started, if it still lives."""
        if self.process.wait(0) is None:
            for worker in self.workers():
                # Each worker leads a group, with the writers and loaders it forked.
                with suppress(ProcessLookupError):
                    os.killpg(worker.pid, signal.SIGKILL)
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(10.0)


class _Program:
    """``mindspeed-train`` in a process that the fork server gave, with the heavy imports behind it."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._process = fork_server_process(_run_program, setup)
        self.pid: int = self._process.pid

    def wait(self, seconds: float) -> int | None:
        """Return the exit status, or None when the program still runs after so many seconds."""
        self._process.join(seconds)
        status: int | None = self._process.exitcode
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal to the program, not to its workers."""
        os.kill(self.pid, number)


def _run_program(setup: Mapping[str, Any]) -> None:
    adopt_parent_environment(setup)
    # A program that a user starts has Python's default, not that of the fork server's children.
    multiprocessing.set_start_method(None, force=True)
    limit = setup["largest_file"]
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    for number in setup["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    sys.exit(import_module(setup["program"]).main(setup["flags"]))


def start_job(
    flags: Sequence[str],
    output: Path,
    *,
    largest_file: int | None = None,
    ignored: Sequence[signal.Signals] = (),
    program: str = "mindspeed_train.program",
    environment: Mapping[str, str] | None = None,
) -> Job:
    """Start ``mindspeed-train FLAGS``.

    Args:
        flags: of the program.
        output: takes what it prints.
        largest_file: bytes that the program and its workers may write into one file.
        ignored: signals that are ignored when the program begins, as under ``nohup``.
        program: another module with a ``main`` that takes flags, for instance ``torch.distributed.run``.
        environment: variables beside those of this process.
    """
    setup = {
        "environment": {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        "path": sys.path,
        "directory": os.getcwd(),
        "output": str(output),
        "flags": list(flags),
        "program": program,
        "largest_file": largest_file,
        "ignored": [int(number) for number in ignored],
    }
    return Job(_Program(setup), output)


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[bool]:
    """Mount a file system of a size (``3m``) at a new folder; yields whether this system lets us."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


@dataclass
class KillReport:
    """The outcome of a job whose workers were killed.

    Attributes:
        kills: how often something was killed.
        victims: how often each kind of victim was; see `kills.VICTIMS`.
        commands: how often the program was started, by a person so to speak.
        starts: the step from which each attempt trained.
        lost: resumes behind a checkpoint that was published before the kill, as messages.
        printed: ``step: (loss, grad norm)`` as printed, of every attempt.
        contradictions: steps that two attempts printed differently, as messages.
        last: the last step of the job.
        leftovers: names of unfinished checkpoints that were left in the folder at the end.
        orphans: processes of the job that outlived it.
    """

    kills: int = 0
    victims: dict[str, int] = field(default_factory=dict)
    commands: int = 0
    starts: list[int] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    printed: dict[int, tuple[str, str]] = field(default_factory=dict)
    contradictions: list[str] = field(default_factory=list)
    last: int = 0
    leftovers: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)


def run_undisturbed(
    flags: Sequence[str], folder: Path, *, processes: int, steps: int
) -> dict[int, tuple[str, str]]:
    """Run the same job undisturbed; return ``step: (loss, grad norm)`` as printed, up to a step."""
    folder.mkdir(parents=True, exist_ok=True)
    own = ["--nproc", str(processes), "--exit-interval", str(steps), "--run-dir", str(folder / "run")]
    job = start_job([*flags, *own], folder / "output.txt")
    try:
        job.end_well(300.0)
    finally:
        job.close()
    report = KillReport()
    read_steps(job.text(), report)
    return report.printed


def records(folder: Path) -> dict[int, tuple[float, float]]:
    """Read the exact ``step: (loss, grad norm)`` of a run's ``metrics.jsonl``."""
    found = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "loss" in record:
            found[int(record["step"])] = (record["loss"], record["grad_norm"])
    return found


def read_steps(text: str, report: KillReport) -> None:
    """Add the steps that a job printed to a report, and where two attempts contradict each other."""
    for step, loss, norm in _STEP.findall(text):
        number, values = int(step), (loss, norm)
        if report.printed.setdefault(number, values) != values:
            report.contradictions.append(f"step {number}: {report.printed[number]} and {values}")


def _lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
