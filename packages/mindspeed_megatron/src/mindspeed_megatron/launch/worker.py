"""A worker's ends of the pipes to its supervisor: failures and its pulse go there, and it ends with it.

Without a supervisor every function here does nothing.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from mindspeed_megatron.launch.environment import SUPERVISOR
from mindspeed_megatron.launch.hang import LONGEST_PULSE, Pulse

LONGEST_TEXT = 30_000
"""Characters of a message; a pipe takes it whole even when nobody reads."""

_watched: set[int] = set()


def supervised() -> bool:
    """Return whether a supervisor started this process."""
    return SUPERVISOR in os.environ


def attach() -> None:
    """End this process when its supervisor is gone, however that happened."""
    if not supervised():
        return
    life = _descriptor(1)
    if os.getpid() not in _watched:
        _watched.add(os.getpid())
        threading.Thread(target=_watch, args=(life,), name="mindspeed supervisor watch", daemon=True).start()


def send_message(kind: str, text: str, **details: Any) -> bool:
    """Report to the supervisor why this worker fails.

    Args:
        kind: ``explained`` (the user can put it right), ``unexpected``, ``consequence`` (of another worker's
            failure), ``hang``, or ``exit`` (a command ends with a status of its own and has said why).
        text: the whole message.
        details: further plain values: ``rank`` where another one is meant, ``status`` of the job, by default
            1.

    Returns:
        Whether a supervisor got the message; otherwise the caller prints it.
    """
    if not supervised():
        return False
    message = json.dumps({"kind": kind, "text": text[-LONGEST_TEXT:], **details}) + "\n"
    try:
        os.write(_descriptor(0), message.encode())
    except OSError:
        return False
    return True


def send_pulse(pulse: Pulse) -> None:
    """Tell the supervisor how this worker is; left out while the supervisor reads nothing."""
    shorter = replace(pulse, stack=pulse.stack[-1000:], place=pulse.place[-400:], note=pulse.note[:400])
    without = replace(pulse, stack="", place="", note="")
    line = next(line for line in map(_line, (pulse, shorter, without)) if len(line) <= LONGEST_PULSE)
    with suppress(BlockingIOError, BrokenPipeError):
        os.write(_descriptor(2), line)


def _line(pulse: Pulse) -> bytes:
    return json.dumps(asdict(pulse)).encode() + b"\n"


def _descriptor(number: int) -> int:
    return int(os.environ[SUPERVISOR].split(",")[number])


def _watch(life: int) -> None:
    # Nothing is ever written: the read ends when the supervisor's end of the pipe is closed.
    while os.read(life, 1):
        pass
    if os.getpgrp() == os.getpid():
        # Writers of a checkpoint and data loaders, which it forked, would wait for each other for ever.
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
