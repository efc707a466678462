"""Mark sub-commands of ``mindspeed-train`` that run in several processes.

A command that knows nothing of its peers would do its work once per process and write the same files from
each, so ``mindspeed-train --nproc N COMMAND`` starts marked commands only.
"""

from __future__ import annotations

from typing import TypeVar

C = TypeVar("C")

_MARK = "mindspeed_parallel"


def parallel_command(command: C) -> C:
    """Mark a click command as one that may run in several processes, and return it.

    ``mindspeed-train --nproc N COMMAND`` starts it N times on this machine; torchrun and srun may start it
    too. Each process, also a single one, has ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and
    ``MASTER_PORT``, and ``torch.distributed.init_process_group()`` works as under torchrun.
    """
    setattr(command, _MARK, True)
    return command


def is_parallel(command: object) -> bool:
    """Return whether a command may run in several processes."""
    return bool(getattr(command, _MARK, False))
