"""Parallel layout of a launch, and the place of one rank in it, by arithmetic alone.

megatron-core lists all groups of all ranks to find those of one rank, which takes a minute at a hundred
thousand ranks. The groups of one rank follow from its coordinates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import Any

from mindspeed_tune.rank_lists import RankList, ranks_along

ORDER = "tp-cp-ep-dp-pp"
"""megatron-core's order of dimensions: the ranks of the first one are neighbours."""
RANKS_PER_NODE = 8
"""Ranks of a node where neither the command nor the hardware says it."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel dimensions of a launch.

    Attributes:
        world_size: all ranks.
        tp: tensor-parallel size.
        cp: context-parallel size.
        pp: pipeline-parallel size.
        ep: expert-parallel size.
        etp: tensor-parallel size of experts.
        vpp: model chunks per rank.
        order: of the dimensions, fastest first.
    """

    world_size: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1
    order: str = ORDER

    def __post_init__(self) -> None:
        for sizes in ((self.tp, self.cp, self.pp), (self.etp, self.ep, self.pp)):
            if self.world_size % prod(sizes):
                raise ValueError(f"a world of {self.world_size} ranks is no multiple of {prod(sizes)}")

    @property
    def dp(self) -> int:
        """Return the data-parallel size, without context parallelism."""
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def expert_dp(self) -> int:
        """Return the data-parallel size of experts."""
        return self.world_size // (self.etp * self.ep * self.pp)

    @property
    def optimizer_shards(self) -> int:
        """Return the ranks among which dense optimizer state is sharded."""
        return self.dp * self.cp

    def sizes(self, expert: bool = False) -> dict[str, int]:
        """Return the size of every dimension in the order of ranks, of dense modules or of experts."""
        dense = {"tp": self.tp, "cp": self.cp, "ep": 1, "dp": self.dp, "pp": self.pp}
        experts = {"tp": self.etp, "cp": 1, "ep": self.ep, "dp": self.expert_dp, "pp": self.pp}
        chosen = experts if expert else dense
        order = self.order.split("-")
        order += [name for name in chosen if name not in order]
        return {name: chosen[name] for name in order}

    def place(self, rank: int, expert: bool = False) -> dict[str, int]:
        """Return a rank's coordinate in every dimension.

        Raises:
            ValueError: the rank is not in the world.
        """
        self._check(rank)
        found, rest = {}, rank
        for name, size in self.sizes(expert).items():
            found[name], rest = rest % size, rest // size
        return found

    def rank(self, place: Mapping[str, int], expert: bool = False) -> int:
        """Return the rank at a place; dimensions that are not named are 0."""
        rank, stride = 0, 1
        for name, size in self.sizes(expert).items():
            rank += place.get(name, 0) * stride
            stride *= size
        return rank

    def group(self, rank: int, dimensions: Iterable[str], expert: bool = False) -> RankList:
        """Return the ranks that differ from ``rank`` in some dimensions only, in the order of the group.

        Raises:
            ValueError: the rank is not in the world.
        """
        self._check(rank)
        wanted, sizes = set(dimensions), self.sizes(expert)
        return ranks_along([*sizes.values()], [name in wanted for name in sizes], rank)

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in a world of {self.world_size} ranks")

    def as_json(self) -> dict[str, Any]:
        """Return the sizes for a JSON file."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __str__(self) -> str:
        """Return ``tp8 cp16 pp16 dp8``."""
        shown = {"tp": self.tp, "cp": self.cp, "pp": self.pp, "vpp": self.vpp, "ep": self.ep, "dp": self.dp}
        return " ".join(f"{name}{size}" for name, size in shown.items() if size > 1) or "one rank"
