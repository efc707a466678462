"""The place of this rank in the grid, and its two groups."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import ProcessGroup

from mindspeed_core.session import current

X, Y = "tp2d.x", "tp2d.y"
"""Names of the process groups."""


@dataclass(frozen=True)
class Place:
    """The groups of this rank, and its place in each.

    Attributes:
        x: ranks that hold different rows of the hidden state, and different rows of a column linear's weight.
        y: ranks that hold different features of the hidden state.
    """

    x: ProcessGroup
    y: ProcessGroup

    @property
    def size(self) -> tuple[int, int]:
        """Return the sizes of both groups."""
        return self.x.size(), self.y.size()

    @property
    def rank(self) -> tuple[int, int]:
        """Return this rank's place in both groups."""
        return self.x.rank(), self.y.rank()


def here() -> Place:
    """Return the place of this rank in the open session's grid."""
    groups = current().groups
    return Place(groups[X], groups[Y])


def parts(x: int, y: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the positions of x groups and of y groups within a tensor-parallel group."""
    return (
        [[j * x + i for i in range(x)] for j in range(y)],
        [[j * x + i for j in range(y)] for i in range(x)],
    )
