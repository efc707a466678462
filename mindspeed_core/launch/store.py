"""The store on a socket that the supervisor opened, so that nobody else can take its port first."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

from mindspeed_core.launch.environment import STORE

if TYPE_CHECKING:
    from torch.distributed import Store

_served: dict[int, Store] = {}


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
