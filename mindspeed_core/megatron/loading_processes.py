"""Loading processes that outlive the SIGTERM with which a run is asked to save and end.

Slurm and torchrun send it to every process of a rank. torch lets its loading processes die of it unless it
comes from their parent, and the training then dies of their loss before it can save.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading


def end_by_parent_alone(worker: int) -> None:
    """Let this loading process end by SIGTERM from its parent, and ignore that of anybody else.

    A ``worker_init_fn`` of a ``DataLoader``; without effect where the system hides who sent a signal.
    """
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_wait_for_parent, name="mindspeed loading end", daemon=True).start()


def _wait_for_parent() -> None:
    # Not the parent in the sense of the system, which is the server where processes come from a fork server.
    parent = multiprocessing.parent_process()
    while parent is not None and signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
        pass
    # As torch's own handler: another status would be reported as the loss of a worker.
    os._exit(0)
