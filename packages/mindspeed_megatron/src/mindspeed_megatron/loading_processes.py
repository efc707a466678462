"""Loading processes that end with their training, and not before.

Slurm and torchrun send SIGTERM to every process of a rank, to ask it to save and end. torch lets its loading
processes die of it unless it comes from their parent, and the training then dies of their loss before it can
save. A training that is killed, on the other hand, leaves those behind that a fork server made: their parent
in the sense of the system, which torch watches, still lives.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable


def end_by_parent_alone(worker: int) -> None:
    """Let this loading process end with its parent or by SIGTERM from it, and ignore that of anybody else.

    A ``worker_init_fn`` of a ``DataLoader``. Where the system hides who sent a signal, any SIGTERM ends it.
    """
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        _watch(_wait_for_parent)
    # After the mask, which threads inherit.
    _watch(_outlive_nobody)


def _watch(target: Callable[[], None]) -> None:
    threading.Thread(target=target, name="mindspeed loading end", daemon=True).start()


def _outlive_nobody() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(0)


def _wait_for_parent() -> None:
    # Not the parent in the sense of the system, which is the server where processes come from a fork server.
    parent = multiprocessing.parent_process()
    while parent is not None and signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
        pass
    # As torch's own handler: another status would be reported as the loss of a worker.
    os._exit(0)
