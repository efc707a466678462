"""Process groups with names: directed pairs, and parts of a group that megatron-core made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

    from mindspeed_core.session import Session


@dataclass
class Mark:
    """Options of a group that say which one it is; gloo reads none.

    Attributes:
        group: its name.
    """

    group: str


def create_groups(session: Session, world_size: int, pg: ProcessGroupCollection) -> None:
    """Create ``toy.forward`` and ``toy.backward`` (pairs of ranks), ``toy.halves`` (of data parallelism)."""
    # Two directions of one pair are two groups, so that their messages cannot overtake each other.
    session.groups.create("toy.forward", [sorted({r, (r + 1) % world_size}) for r in range(world_size)])
    session.groups.create("toy.backward", [sorted({r, (r - 1) % world_size}) for r in range(world_size)])
    size = pg.dp.size()
    half = max(1, size // 2)
    halves = [list(range(start, min(start + half, size))) for start in range(0, size, half)]
    session.groups.split("toy.halves", pg.dp, halves)
