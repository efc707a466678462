"""The inside of the process beside training: get a job, do it, report, until the trainer ends."""

from __future__ import annotations

import ctypes
import json
import marshal
import mmap
import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from mindspeed_train.checkpoint.reasons import reason_of

MEMORY_BEGIN = mmap.ALLOCATIONGRANULARITY
"""Bytes of the shared memory, from its begin, in which the process counts its progress."""
IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""The trainer decides what its signals mean; a save that is under way is finished."""
_LOWEST_PRIORITY = 19
_PR_SET_PDEATHSIG = 1


def serve(work: str, memory: int, trainer: int) -> None:
    """Do one job after another until the trainer closes the pipe or ends.

    Args:
        work: ``module:function``.
        memory: descriptor of the shared memory.
        trainer: the id of the process that started this one.
    """
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    _die_with_parent(trainer)
    # What the work prints is no outcome.
    outcomes = os.dup(1)
    os.dup2(2, 1)
    module, _, name = work.partition(":")
    function = getattr(import_module(module), name)
    # On a machine without a free core training goes first.
    os.setpriority(os.PRIO_PROCESS, 0, _LOWEST_PRIORITY)
    beats = mmap.mmap(memory, MEMORY_BEGIN)

    def beat() -> None:
        beats[:8] = (int.from_bytes(beats[:8], "little") + 1).to_bytes(8, "little")

    for line in sys.stdin.buffer:
        beat()
        at, size = map(int, line.split())
        job = marshal.loads(os.pread(memory, size, at))
        outcome = memoryview(json.dumps(_outcome(function, job, memory, beat)).encode() + b"\n")
        try:
            while outcome:
                outcome = outcome[os.write(outcomes, outcome) :]
        except BrokenPipeError:
            # The trainer ended; the kernel ends this process for that a moment later.
            os._exit(1)


def _outcome(function: Callable[..., Any], job: Any, memory: int, beat: Callable[[], None]) -> dict[str, Any]:
    try:
        result = function(job, memoryview(mmap.mmap(memory, 0, access=mmap.ACCESS_READ)), beat)
        return {"reason": None, "result": result}
    except BaseException as error:
        return {"reason": reason_of(error), "result": None}


def _die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however that ends.

    Otherwise a process of a killed trainer would write on, into a folder that the next attempt clears away.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
