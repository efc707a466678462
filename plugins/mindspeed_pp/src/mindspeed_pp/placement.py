"""Where pipeline stages live: the rank of every stage of the model, and its chunk there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Placement:
    """The pipeline rank of every global stage; a rank's chunks are numbered in the order of their stages.

    Attributes:
        ranks: by stage.
    """

    ranks: tuple[int, ...]

    @cached_property
    def size(self) -> int:
        """Return the number of pipeline ranks."""
        return max(self.ranks) + 1

    @property
    def stages(self) -> int:
        """Return the number of stages."""
        return len(self.ranks)

    @cached_property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """Return the stages of each rank, by chunk."""
        return tuple(
            tuple(stage for stage, owner in enumerate(self.ranks) if owner == rank)
            for rank in range(self.size)
        )

    @cached_property
    def _chunks(self) -> tuple[int, ...]:
        return tuple(self.held[rank].index(stage) for stage, rank in enumerate(self.ranks))

    def chunk(self, stage: int) -> int:
        """Return the number of a stage among those of its rank."""
        return self._chunks[stage]

    @property
    def loss_rank(self) -> int:
        """Return the rank of the last stage."""
        return self.ranks[-1]

    @property
    def is_loop(self) -> bool:
        """Return whether stages run down the ranks again and again, as megatron-core places them."""
        return self.ranks == loop(self.size, self.stages // self.size).ranks

    def problems(self) -> Sequence[str]:
        """Return why no model can be placed so, one sentence each."""
        counts = {len(stages) for stages in self.held}
        if min(self.ranks) < 0 or 0 in counts:
            return (f"ranks {' '.join(map(str, self.ranks))}: a pipeline rank has no stage",)
        if len(counts) > 1:
            return (
                f"ranks {' '.join(map(str, self.ranks))}: ranks have different numbers of stages, and "
                "megatron-core builds as many chunks on each",
            )
        return ()


def loop(ranks: int, chunks: int = 1) -> Placement:
    """Place stages down the ranks, ``chunks`` times: stage ``s`` is on rank ``s % ranks``."""
    return Placement(tuple(stage % ranks for stage in range(ranks * chunks)))


def vee(ranks: int) -> Placement:
    """Place stages down the ranks and up again, so that rank 0 holds the first and the last one."""
    return Placement((*range(ranks), *reversed(range(ranks))))
