"""Groups of a rank in another layout of the same tensor-, context- and expert-parallel sizes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

from mindspeed_tune.layout import Layout
from mindspeed_tune.rank_lists import RankList, compressed
from mindspeed_tune.record import Group, RankRecord
from mindspeed_tune.small_pipeline import NotComposable

_DENSE, _EXPERT = ("tp", "cp", "dp", "pp"), ("tp", "ep", "dp", "pp")


@dataclass(frozen=True)
class Along:
    """Dimensions of a layout that a group lies along.

    Attributes:
        dimensions: in which its ranks differ; empty for ranks within a block that another layout has too.
        expert: in the layout of experts.
        ends: the first and the last pipeline stage alone, which share an embedding.
    """

    dimensions: tuple[str, ...] = ()
    expert: bool = False
    ends: bool = False

    @property
    def sharded(self) -> bool:
        """Return whether parameters are replicated, or their optimizer state sharded, along it."""
        return "dp" in self.dimensions


def along(record: RankRecord, group: Group) -> Along:
    """Return how a group of a rank lies in the rank's layout.

    Raises:
        NotComposable: the group is no regular part of the layout.
    """
    layout, rank = record.layout, record.rank
    wanted = sorted(group.ranks)
    for expert, names in ((False, _DENSE), (True, _EXPERT)):
        for count in range(len(names) + 1):
            for dimensions in combinations(names, count):
                if sorted(layout.group(rank, dimensions, expert)) == wanted:
                    return Along(dimensions, expert)
    place = layout.place(rank)
    ends = [layout.rank({**place, "pp": stage}) for stage in (0, layout.pp - 1)]
    if wanted == sorted(ends):
        return Along(ends=True)
    block = layout.tp * layout.cp
    if len({one // block for one in wanted}) == 1:
        return Along()
    raise NotComposable(f"the group {group.name} is no regular part of the layout")


def placed(way: Along, record: RankRecord, group: Group, layout: Layout, rank: int) -> RankList:
    """Return the ranks of a group in another layout, as one of its ranks sees it."""
    if way.ends and layout.pp == 1:
        return compressed((rank,))
    if way.ends:
        place = layout.place(rank)
        return compressed(tuple(layout.rank({**place, "pp": stage}) for stage in (0, layout.pp - 1)))
    if way.dimensions:
        return layout.group(rank, way.dimensions, way.expert)
    return compressed(tuple(rank + one - record.rank for one in group.ranks))
