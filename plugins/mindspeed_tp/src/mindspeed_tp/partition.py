"""Sizes of the parts into which tensor parallelism cuts a dimension; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Partition:
    """Parts of a dimension, one per rank of a group, in rank order.

    Attributes:
        sizes: of each part.
    """

    sizes: tuple[int, ...]

    @classmethod
    def of(cls, total: int, ranks: int) -> Partition:
        """Distribute ``total``: the first ranks get one more where it does not divide."""
        return cls(tuple(total // ranks + (rank < total % ranks) for rank in range(ranks)))

    @property
    def total(self) -> int:
        """Return the size of the whole dimension."""
        return sum(self.sizes)

    @property
    def largest(self) -> int:
        """Return the size of the largest part."""
        return max(self.sizes)

    @property
    def even(self) -> bool:
        """Return whether all parts are of one size."""
        return len(set(self.sizes)) == 1

    @property
    def idle(self) -> float:
        """Return how long ranks wait for the one with the largest part, as a share of the work."""
        return self.largest * len(self.sizes) / self.total - 1

    def start(self, rank: int) -> int:
        """Return where the part of a rank begins."""
        return (0, *accumulate(self.sizes))[rank]

    def times(self, factor: int) -> Partition:
        """Return the partition of a dimension whose every element stands for ``factor`` of another one."""
        return Partition(tuple(size * factor for size in self.sizes))
