"""A worker's end of the pipe to its supervisor: it reports failures, and ends when the supervisor does.

Without a supervisor every function here does nothing.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from typing import Any

from mindspeed_core.launch.environment import SUPERVISOR

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
    life = int(os.environ[SUPERVISOR].split(",")[1])
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
        os.write(int(os.environ[SUPERVISOR].split(",")[0]), message.encode())
    except OSError:
        return False
    return True


def _watch(life: int) -> None:
    # Nothing is ever written: the read ends when the supervisor's end of the pipe is closed.
    while os.read(life, 1):
        pass
    if os.getpgrp() == os.getpid():
        # Writers of a checkpoint and data loaders, which it forked, would wait for each other for ever.
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
