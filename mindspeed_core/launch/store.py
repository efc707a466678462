"""The store on a socket that the supervisor opened, so that nobody else can take its port first."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

from mindspeed_core.launch.environment import STORE

if TYPE_CHECKING:
    from torch.distributed import Store

_served: dict[int, Store] = {}

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Tells torch's rendezvous that somebody serves the store already, so that every rank only connects."""


def serve_rendezvous() -> None:
    """Make ``torch.distributed.init_process_group()`` work in this worker as it does under torchrun."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return
    served_store(timedelta(minutes=30))
    # From here on rank 0 connects like every other rank; torch puts a prefix before the keys of all of them.
    os.environ.pop(STORE, None)
    os.environ[AGENT_STORE] = "True"


def served_store(timeout: timedelta) -> Store | None:
    """Return the store that this process serves for its peers, or None where it serves none.

    ``timeout`` holds for every wait on the store.
    """
    import torch.distributed as dist

    descriptor = os.environ.get(STORE)
    if descriptor is None:
        return None
    pid = os.getpid()
    if pid not in _served:
        _served[pid] = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=int(descriptor),
        )
    return _served[pid]
