"""Process groups with names: directed pairs, and parts of a group that megatron-core made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

    from mindspeed_core.session import Session


def create_groups(session: Session, world_size: int, pg: ProcessGroupCollection) -> None:
    """Create ``toy.forward`` and ``toy.backward`` (pairs of ranks), ``toy.halves`` (of data parallelism)."""
    # Two directions of one pair are two groups, so that their messages cannot overtake each other.
    session.groups.create("toy.forward", [sorted({r, (r + 1) % world_size}) for r in range(world_size)])
    session.groups.create("toy.backward", [sorted({r, (r - 1) % world_size}) for r in range(world_size)])
    mine = dist.get_process_group_ranks(pg.dp)
    everywhere: list[Any] = [None] * world_size
    dist.all_gather_object(everywhere, mine)
    whole = sorted({tuple(ranks) for ranks in everywhere})
    half = max(1, len(mine) // 2)
    halves = [ranks[start : start + half] for ranks in whole for start in range(0, len(ranks), half)]
    session.groups.create("toy.halves", halves)
