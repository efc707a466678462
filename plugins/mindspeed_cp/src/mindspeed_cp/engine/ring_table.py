"""The keys that each rank of a ring holds at each step, and how they get there: pure index arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache


@dataclass(frozen=True)
class Move:
    """One block going from one rank to another.

    Attributes:
        block: whose keys and values.
        source: who sends.
        target: who receives.
        post: the step before whose computation it is posted.
        arrive: the step before whose computation it is waited for.
        outer: it crosses windows of a double ring.
    """

    block: int
    source: int
    target: int
    post: int
    arrive: int
    outer: bool = False


@dataclass(frozen=True)
class RingTable:
    """The block that each rank holds at each step, and how blocks get there.

    Attributes:
        hold: ``hold[step][rank]`` is a block; every rank meets every block once, its own first.
        moves: of the forward pass.
    """

    hold: tuple[tuple[int, ...], ...]
    moves: tuple[Move, ...]

    @property
    def ranks(self) -> int:
        """Return the number of ranks, of blocks and of steps."""
        return len(self.hold[0])

    def holder(self, step: int, block: int) -> int:
        """Return the rank that holds a block at a step."""
        return self.hold[step].index(block)

    @cached_property
    def backward_moves(self) -> tuple[Move, ...]:
        """Return the moves of blocks and their gradients, last step first, with steps in that order."""
        last = len(self.hold) - 1
        return tuple(
            Move(block, self.holder(last - step, block), self.holder(last - step - 1, block), step, step + 1)
            for step in range(last)
            for block in range(self.ranks)
        )


@lru_cache(maxsize=16)
def ring_table(ranks: int, window: int = 1) -> RingTable:
    """Return a single ring, or with ``window`` > 1 rings of that many ranks inside a ring of windows.

    Raises:
        ValueError: ``window`` does not divide ``ranks``.
    """
    if window < 1 or ranks % window:
        raise ValueError(f"rings of {ranks} ranks cannot have windows of {window}")
    inner = window if window > 1 else ranks
    windows = ranks // inner
    hold, moves = [], []
    for step in range(ranks):
        outer, turn = divmod(step, inner)
        held = [
            (place // inner - outer) % windows * inner + (place % inner - turn) % inner
            for place in range(ranks)
        ]
        hold.append(tuple(held))
        for place in range(ranks):
            own, index = divmod(place, inner)
            if turn + 1 < inner:
                neighbour = own * inner + (index + 1) % inner
                moves.append(Move(held[place], place, neighbour, step, step + 1))
            if turn == 0 and outer + 1 < windows:
                across = (own + 1) % windows * inner + index
                moves.append(Move(held[place], place, across, step, step + inner, outer=True))
    return RingTable(tuple(hold), tuple(moves))
