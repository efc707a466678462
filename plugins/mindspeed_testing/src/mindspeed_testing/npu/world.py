"""A world of any size in which this process is alone, without a session.

The groups are those of the platform ``fake-npu``: collectives reach nobody and change nothing, questions to
other ranks are answered as if they said what this one says, and every group has the name of a communicator.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from mindspeed_core.platforms.platform import Position
from mindspeed_core.runtime.patches import PatchLedger
from mindspeed_megatron.fake.npu import COMMUNICATORS
from mindspeed_megatron.fake.world import world_patches


@contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[dist.ProcessGroup]:
    """Start ``torch.distributed`` as one rank of a world that does not exist; yield its group."""
    ledger = PatchLedger()
    ledger.apply([*world_patches(Position(rank, size, 0)), COMMUNICATORS], owner="fake world")
    try:
        dist.init_process_group("fake")
        yield dist.group.WORLD  # type: ignore[misc]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        ledger.revert()
