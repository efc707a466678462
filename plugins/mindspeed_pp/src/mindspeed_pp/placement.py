"""Placement of pipeline stages: the rank of every stage of the model, and its chunk there.

A schedule may hold the model several times. Then stages are counted on through its copies: with 4 stages and
2 copies, stage 5 is the second stage of the second copy. Copies share the micro-batches of a step by turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Placement:
    """The pipeline rank of every global stage; a rank's chunks are numbered in the order of the model.

    Attributes:
        ranks: by stage, copy after copy.
        copies: how often the model is held.
    """

    ranks: tuple[int, ...]
    copies: int = 1

    @cached_property
    def size(self) -> int:
        """Return the number of pipeline ranks."""
        return max(self.ranks) + 1

    @property
    def stages(self) -> int:
        """Return the number of stages, those of all copies."""
        return len(self.ranks)

    @property
    def depth(self) -> int:
        """Return the number of stages of the model."""
        return len(self.ranks) // self.copies

    def position(self, stage: int) -> int:
        """Return the place of a stage in the model, the same in every copy."""
        return stage % self.depth

    def is_first(self, stage: int) -> bool:
        """Return whether a stage is the first one of the model."""
        return self.position(stage) == 0

    def is_last(self, stage: int) -> bool:
        """Return whether a stage is the last one of the model."""
        return self.position(stage) == self.depth - 1

    def owns(self, stage: int, microbatch: int) -> bool:
        """Return whether a stage sees a micro-batch."""
        return microbatch % self.copies == stage // self.depth

    def parts(self, rank: int) -> int:
        """Return into how many chunks a rank's share of the layers of one model is cut."""
        return len(self.held[rank]) // self.copies

    @cached_property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """Return the stages of each rank, by chunk."""
        return tuple(
            tuple(sorted((s for s, owner in enumerate(self.ranks) if owner == rank), key=self.position))
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
        """Return the rank of the last stage, of the first copy."""
        return self.ranks[self.depth - 1]

    @property
    def is_loop(self) -> bool:
        """Return whether stages run down the ranks again and again, as megatron-core places them."""
        return self == loop(self.size, self.stages // self.size)

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


def mirrored(ranks: int, copies: int) -> Placement:
    """Hold the model several times: half of the copies run down the ranks, half of them up.

    Copies of one direction begin ``2 * ranks / copies`` ranks apart, so that the ranks that hold a stage hold
    the same stages all.

    Args:
        ranks: a multiple of ``copies``.
        copies: a power of two.
    """
    apart = 2 * ranks // copies
    down = [[(stage + apart * k) % ranks for stage in range(ranks)] for k in range(copies // 2)]
    up = [[(ranks - 1 - stage - apart * k) % ranks for stage in range(ranks)] for k in range(copies // 2)]
    return Placement(tuple(rank for copy in (*down, *up) for rank in copy), copies)
