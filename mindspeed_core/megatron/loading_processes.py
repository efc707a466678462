"""Loading processes that outlive the SIGTERM with which a run is asked to save and end.

Slurm and torchrun send it to every process of a rank. torch lets its loading processes die of it, and the
training then dies of their loss before it can save.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Mapping
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.popen_fork import Popen
from typing import Any


class _Popen(Popen):
    def terminate(self) -> None:
        # With SIGTERM an end of the training would wait for the process for ever.
        self.kill()


class _Process(ForkProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Popen:
        return _Popen(process_obj)


class _Context(ForkContext):
    Process = _Process


def _ignore_sigterm(worker: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def loading_processes(num_workers: int) -> Mapping[str, Any]:
    """Return the arguments of a ``DataLoader`` whose processes ignore SIGTERM and are ended by their parent.

    Empty without processes, and where somebody chose not to fork them.
    """
    if not num_workers or multiprocessing.get_start_method() != "fork":
        return {}
    return {"multiprocessing_context": _Context(), "worker_init_fn": _ignore_sigterm}
