"""A given attention matrix in tiles: which of them have scores that count, and which have nothing else.

Kernels compute whole tiles, so that tiles decide what a mask costs, what it needs of other ranks, and which
rows of it belong together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mindspeed_cp.engine.layout import Interval

TILE = 128
"""Queries and keys of one tile."""
_ROWS = 1024


@dataclass(frozen=True)
class Tiles:
    """The tiles of a matrix.

    Attributes:
        some: ``[t, t]`` bool, tiles with a score that counts.
        all: ``[t, t]`` bool, tiles of which every score counts.
    """

    some: npt.NDArray[np.bool_]
    all: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, matrix: npt.NDArray[np.bool_]) -> Tiles:
        """Build the tiles of a matrix ``[s, s]``; those at its end may be smaller."""
        length = len(matrix)
        starts = np.arange(0, length, TILE)
        some = np.empty((len(starts), len(starts)), dtype=bool)
        whole = np.empty_like(some)
        for index, start in enumerate(starts):
            block = matrix[start : start + TILE]
            some[index] = np.logical_or.reduceat(block.any(0), starts)
            whole[index] = np.logical_and.reduceat(block.all(0), starts)
        return cls(some, whole)

    def full(self, queries: Interval, keys: Interval) -> bool:
        """Return whether every score of a rectangle counts, as far as whole tiles say."""
        return bool(self.all[_covering(queries), _covering(keys)].all())

    def row_work(self, low: npt.NDArray[np.int64], high: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return ``[s]``, the scores in the tiles that are computed for each query.

        Args:
            low: ``[s]``, the first key that each query may see besides.
            high: ``[s]``, the first key that it may not.
        """
        starts = np.arange(0, len(low), TILE)
        first, last = np.minimum.reduceat(low, starts), np.maximum.reduceat(high, starts)
        inside = (starts[None, :] + TILE > first[:, None]) & (starts[None, :] < last[:, None])
        work = np.count_nonzero(self.some & inside, axis=1).astype(np.int64) * TILE
        return np.repeat(work, TILE)[: len(low)]

    def groups(self) -> npt.NDArray[np.int64]:
        """Order rows of tiles so that those that see the same stand together.

        Tiles see the same where they see, and are seen by, the same tiles: so those of one document do, under
        a causal mask too.
        """
        either = self.some | self.some.T
        names = [row.tobytes() for row in np.packbits(either, axis=1)]
        number = {name: index for index, name in reversed(list(enumerate(names)))}
        return np.argsort([number[name] for name in names], kind="stable")


def _covering(interval: Interval) -> slice:
    return slice(interval[0] // TILE, -(-interval[1] // TILE))


def runs(tiles: Tiles, row: int, keys: Interval) -> Iterator[tuple[int, int, bool]]:
    """Runs of neighbouring tiles in a row that have scores which count: first key, end, nothing else."""
    place = _covering(keys)
    some = tiles.some[row, place]
    edges = np.flatnonzero(np.diff(np.concatenate(([False], some, [False])).astype(np.int8)))
    for low, high in zip(edges[::2] + place.start, edges[1::2] + place.start):
        yield int(low) * TILE, int(high) * TILE, bool(tiles.all[row, low:high].all())


def row_sums(
    visible: Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64]], npt.NDArray[np.bool_]], length: int
) -> npt.NDArray[np.int64]:
    """Return ``[s]``, what counts in each row of a mask that is given by pieces."""
    keys = np.arange(length, dtype=np.int64)
    parts = [
        np.count_nonzero(visible(keys[start : start + _ROWS], keys), axis=1)
        for start in range(0, length, _ROWS)
    ]
    return np.concatenate(parts).astype(np.int64)
