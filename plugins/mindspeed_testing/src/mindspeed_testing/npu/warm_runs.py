"""Runs of pytest in forks of one process that has torch, torch_npu and megatron-core imported.

``python -m mindspeed_testing.npu.warm_runs`` reads a job from each line of its input, JSON of `Job`, and
answers with a line: the first failure, empty where all tests pass. Plugins are imported by the forks, so that
each can put the source of a fault in the place of a file's.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from mindspeed_testing.planted_source import plant_everywhere

MODULES = (
    *("pytest", "_pytest.assertion.rewrite", "hypothesis", "torch.distributed", "torch_npu"),
    *("megatron.core.models.gpt", "megatron.core.distributed", "megatron.core.optimizer"),
    *("mindspeed_core.activation", "mindspeed_train.interface"),
    *("mindspeed_testing.training", "mindspeed_testing.npu.device"),
    *("mindspeed_testing.npu.value_training", "mindspeed_testing.npu.training"),
)
MARK = "mindspeed-run:"
"""Begins a line with an answer."""
DEVICE = ("torch_npu", "mindspeed_testing.npu.device")
"""Modules of `MODULES` that a run without a device does not import."""


@dataclass(frozen=True)
class Job:
    """A run.

    Attributes:
        options: of pytest, with the tests.
        path: the file of a fault; empty without one.
        text: the file with its changed source.
        log: receives what the run prints.
        seconds: after which the run is ended, which counts as a failure.
    """

    options: tuple[str, ...]
    path: str
    text: str
    log: str
    seconds: float


def failure(job: Job) -> str:
    """Run a job in a fork; return its first failure, empty where all pass."""
    child = os.fork()
    if child == 0:
        _run(job)
    if not _ended(child, job.seconds):
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return f"no end within {job.seconds:g} s"
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status in (0, 5):
        return ""
    lines = Path(job.log).read_text(encoding="utf-8", errors="replace").splitlines()
    named = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return (named or lines[-1:] or [f"exit status {status}"])[0]


def _run(job: Job) -> None:
    """Run the tests of a job, and end this process with the status."""
    status = 1
    try:
        os.setpgid(0, 0)
        out = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor in (1, 2):
            os.dup2(out, descriptor)
        if job.path:
            plant_everywhere(Path(job.path), Path(job.text))
        status = int(import_module("pytest").main(list(job.options)))
        sys.stdout.flush()
    finally:
        os._exit(status)


def _ended(child: int, seconds: float) -> bool:
    """Wait until a process has ended; return False after some seconds."""
    descriptor = os.pidfd_open(child)
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


def main(arguments: Sequence[str]) -> None:
    """Import what takes long, then serve jobs until the input ends; ``--plain`` leaves the device out."""
    for name in MODULES:
        if "--plain" not in arguments or name not in DEVICE:
            import_module(name)
    for line in sys.stdin:
        given = json.loads(line)
        started = time.monotonic()
        found = failure(Job(**{**given, "options": tuple(given["options"])}))
        answer = {"failure": found, "seconds": round(time.monotonic() - started, 1)}
        print(MARK + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
