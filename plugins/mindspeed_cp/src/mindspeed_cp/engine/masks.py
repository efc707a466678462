"""Masks as rules about global positions: pure index arithmetic.

A rule cuts any rectangle of queries and keys into pieces that a kernel computes: whole rectangles, squares
under a causal mask, and, only where a window or a given matrix crosses them, rectangles with a mask.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from mindspeed_cp.engine.layout import Interval, union
from mindspeed_cp.engine.tiles import TILE, Tiles, row_sums, runs

FULL, CAUSAL, MASKED = "full", "causal", "masked"
BAND_ROWS = 512
"""Queries of one piece of a window: what is computed beside the window stays within so many keys."""


@dataclass(frozen=True)
class Piece:
    """A rectangle of scores that are computed together, in global positions.

    Attributes:
        queries: rows.
        keys: columns.
        kind: `FULL`: every score; `CAUSAL`: a square, key ``i`` up to query ``i``; `MASKED`: see
            `MaskRule.visible`.
    """

    queries: Interval
    keys: Interval
    kind: str


@dataclass(frozen=True)
class MaskRule:
    """A rule that says which scores of a sequence count.

    Attributes:
        length: positions of the sequence.
        causal: a query sees no later key.
        ends: running ends of documents that do not see one another; empty for one document.
        window: a query sees at most this many keys before its own; None for all of them.
        prefix: the first keys that every query of the sequence sees.
        matrix: ``[s, s]`` bool, True where a score counts; on top of everything else. Not to be changed.
    """

    length: int
    causal: bool = True
    ends: tuple[int, ...] = ()
    window: int | None = None
    prefix: int = 0
    matrix: npt.NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        if self.ends and (self.ends[-1] != self.length or any(np.diff((0, *self.ends)) <= 0)):
            raise ValueError(f"ends of documents must rise to {self.length}, got {self.ends}")
        if self.prefix and (self.ends or not self.causal):
            raise ValueError("a prefix belongs to one causal sequence")
        if self.matrix is not None and self.matrix.shape != (self.length, self.length):
            raise ValueError(f"a mask of {self.length} positions is square, got {self.matrix.shape}")

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, MaskRule) and self.signature() == other.signature())

    def signature(self) -> tuple[object, ...]:
        """Return what two equal rules have in common."""
        return (self.length, self.causal, self.ends, self.window, self.prefix, self._matrix_key)

    @cached_property
    def _hash(self) -> int:
        return hash(self.signature())

    @cached_property
    def _matrix_key(self) -> bytes:
        if self.matrix is None:
            return b""
        return hashlib.blake2b(np.packbits(self.matrix).tobytes(), digest_size=16).digest()

    @cached_property
    def tiles(self) -> Tiles:
        """Return which tiles of the given matrix have scores that count, and which have nothing else."""
        assert self.matrix is not None
        return Tiles.of(self.matrix)

    def reach(self, queries: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return ``low`` and ``high``: keys from low to before high are what a query sees beside a prefix.

        The given matrix is not asked.
        """
        low, high = np.zeros_like(queries), np.full_like(queries, self.length)
        if self.ends:
            edges = np.asarray((0, *self.ends), dtype=np.int64)
            document = np.searchsorted(edges, queries, side="right")
            low, high = edges[document - 1], edges[document]
        if self.window is not None:
            low = np.maximum(low, queries - self.window)
            high = np.minimum(high, queries + self.window + 1)
        if self.causal:
            high = np.minimum(high, queries + 1)
        return low, high

    @cached_property
    def row_scores(self) -> npt.NDArray[np.int64]:
        """Return ``[s]``, how many scores of each query count."""
        queries = np.arange(self.length, dtype=np.int64)
        if self.matrix is None:
            low, high = self.reach(queries)
            return self.prefix + np.maximum(high - np.maximum(low, self.prefix), 0)
        if not (self.causal or self.ends or self.window is not None):
            return np.count_nonzero(self.matrix, axis=1).astype(np.int64)
        return row_sums(self.visible, self.length)

    @cached_property
    def running_scores(self) -> npt.NDArray[np.int64]:
        """Return ``[s + 1]``, how many scores of all queries before each one count."""
        return running_sums(self.row_scores)

    def work(self, tile: int) -> npt.NDArray[np.int64]:
        """Return ``[s]``, the scores computed for each query; under a matrix whole tiles of ``tile``."""
        if self.matrix is None or tile == 1:
            return self.row_scores
        low, high = self.reach(np.arange(self.length, dtype=np.int64))
        return self.tiles.row_work(low, high)

    def visible(self, queries: npt.NDArray[np.int64], keys: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return ``[q, k]`` bool, which of these positions see one another."""
        i, j = queries[:, None], keys[None, :]
        seen = np.ones((len(queries), len(keys)), dtype=bool)
        if self.causal:
            seen &= j <= i
        if self.window is not None:
            seen &= j >= i - self.window
            if not self.causal:
                seen &= j <= i + self.window
        if self.prefix:
            seen |= np.broadcast_to(j < self.prefix, seen.shape)
        if self.ends:
            edges = np.asarray(self.ends)
            seen &= np.searchsorted(edges, i, side="right") == np.searchsorted(edges, j, side="right")
        if self.matrix is not None:
            seen &= self.matrix[_selection(queries, keys)]
        return seen

    def pieces(self, queries: Interval, keys: Interval) -> list[Piece]:
        """Return what has to be computed of a rectangle; every visible score is in exactly one piece."""
        found: list[Piece] = []
        for q, k, alone in self._inside_documents(queries, keys):
            if not alone:
                if self.visible(np.arange(*q), np.arange(*k)).any():
                    found.append(Piece(q, k, MASKED))
                continue
            if self.prefix:
                head = (k[0], min(k[1], max(k[0], self.prefix)))
                if head[1] > head[0]:
                    found.append(Piece(q, head, FULL))
                k = (max(k[0], head[1]), k[1])
            found += self._triangle(q, k) if self.causal else _rectangle(q, k, FULL)
        if self.window is not None:
            found = [cut for piece in found for cut in self._windowed(piece)]
        if self.matrix is not None:
            found = [cut for piece in found for cut in self._by_tiles(piece)]
        return found

    def _inside_documents(
        self, queries: Interval, keys: Interval
    ) -> Iterator[tuple[Interval, Interval, bool]]:
        """Iterate over rectangles inside of documents, or of groups of small ones: whether it is one."""
        if not self.ends:
            yield queries, keys, True
            return
        ends, alone = self._groups
        index = bisect_right(ends, max(queries[0], keys[0]))
        start = ends[index - 1] if index else 0
        for place in range(index, len(ends)):
            end = ends[place]
            if start >= min(queries[1], keys[1]):
                return
            q, k = (max(queries[0], start), min(queries[1], end)), (max(keys[0], start), min(keys[1], end))
            last = q[1] if self.causal else self.length
            if q[1] > q[0] and min(k[1], last) > k[0]:
                yield q, (k if alone[place] else (k[0], min(k[1], last))), alone[place]
            start = end

    @cached_property
    def _groups(self) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Return the ends of documents, small neighbours as one group, and which are single documents.

        Padding, for one, may come as documents of a single token, and a kernel is called for each group.
        """
        ends: list[int] = []
        alone: list[bool] = []
        start = 0
        for previous, end in zip((0, *self.ends), self.ends):
            if ends and end - start <= TILE:
                ends[-1], alone[-1] = end, False
            else:
                ends.append(end)
                alone.append(True)
                start = previous
        return tuple(ends), tuple(alone)

    @staticmethod
    def _triangle(queries: Interval, keys: Interval) -> list[Piece]:
        """Cut a rectangle by the diagonal: whole rectangles, and the square that the diagonal crosses."""
        (a, b), (c, d) = queries, keys
        low, high = max(a, c), min(b, d)
        if low >= high:
            return _rectangle(queries, keys, FULL) if d <= a else []
        found = _rectangle((low, b), (c, low), FULL)
        found.append(Piece((low, high), (low, high), CAUSAL))
        return found + _rectangle((high, b), (low, high), FULL)

    def _windowed(self, piece: Piece) -> list[Piece]:
        assert self.window is not None
        if self.prefix and piece.keys[1] <= self.prefix:
            return [piece]
        (a, b), (c, d) = self._narrowed(piece.queries, piece.keys)
        if a >= b or c >= d:
            return []
        inside = c >= b - 1 - self.window and (self.causal or d - 1 <= a + self.window)
        if inside and (piece.kind == FULL or (a, b) == (c, d)):
            return [Piece((a, b), (c, d), piece.kind)]
        rows = max(BAND_ROWS, self.window // 8)
        found = []
        for start in range(a, b, rows):
            q, k = self._narrowed((start, min(start + rows, b)), (c, d))
            if piece.kind == CAUSAL:
                k = (k[0], min(k[1], q[1]))
            found += _rectangle(q, k, MASKED)
        return found

    def _narrowed(self, queries: Interval, keys: Interval) -> tuple[Interval, Interval]:
        """Return a rectangle without the rows and columns that a window leaves nothing of."""
        assert self.window is not None
        (a, b), (c, d) = queries, keys
        ahead = 0 if self.causal else self.window
        c, d = max(c, a - self.window), min(d, b + ahead)
        return (max(a, c - ahead), min(b, d + self.window)), (c, d)

    def _by_tiles(self, piece: Piece) -> list[Piece]:
        """Cut a piece into runs of tiles with scores that count; rows with the same runs together."""
        (a, b), (c, d) = piece.queries, piece.keys
        if self.tiles.full((a, b), (c, d)):
            return [piece]
        found: list[Piece] = []
        before: dict[tuple[Interval, str], int] = {}
        for row in range(a // TILE, -(-b // TILE)):
            rows = (max(a, row * TILE), min(b, (row + 1) * TILE))
            last = min(d, rows[1]) if piece.kind == CAUSAL else d
            now: dict[tuple[Interval, str], int] = {}
            for low, high, full in runs(self.tiles, row, (c, last)):
                kind = FULL if full and piece.kind == FULL else MASKED
                keys = (max(c, low), min(last, high))
                index = before.get((keys, kind))
                if index is None:
                    index = len(found)
                    found.append(Piece(rows, keys, kind))
                else:
                    found[index] = Piece((found[index].queries[0], rows[1]), keys, kind)
                now[keys, kind] = index
            before = now
        return found

    def pairs(self, queries: Interval, keys: Interval | None = None) -> int:
        """Return how many scores of a rectangle count."""
        if keys is None or keys == (0, self.length):
            return int(self.running_scores[queries[1]] - self.running_scores[queries[0]])
        total = 0
        for piece in self.pieces(queries, keys):
            (a, b), (c, d) = piece.queries, piece.keys
            if piece.kind == FULL:
                total += (b - a) * (d - c)
            elif piece.kind == CAUSAL:
                total += (b - a) * (b - a + 1) // 2
            else:
                total += self._masked_pairs(piece)
        return total

    def _masked_pairs(self, piece: Piece) -> int:
        (a, b), (c, d) = piece.queries, piece.keys
        if self.matrix is None:
            low, high = self.reach(np.arange(a, b))
            return int(np.maximum(np.minimum(high, d) - np.maximum(low, c), 0).sum())
        return int(self.visible(np.arange(a, b), np.arange(c, d)).sum())

    def needed_keys(self, queries: Sequence[Interval]) -> list[Interval]:
        """Return the keys that some of these queries may see, as disjoint rising intervals."""
        some = [interval for interval in queries if interval[1] > interval[0]]
        if self.matrix is not None:
            everything = (0, self.length)
            return union(piece.keys for interval in some for piece in self.pieces(interval, everything))
        # A query sees itself and its neighbour begins where it does or later: the keys of an interval hang
        # together.
        firsts, lasts = (np.array([edge[i] for edge in some], dtype=np.int64) for i in (0, 1))
        low, _ = self.reach(firsts)
        _, high = self.reach(lasts - 1)
        found = [(int(start), int(end)) for start, end in zip(low, high)]
        if self.prefix and some:
            found.append((0, self.prefix))
        return union(found)


def _rectangle(queries: Interval, keys: Interval, kind: str) -> list[Piece]:
    empty = queries[1] <= queries[0] or keys[1] <= keys[0]
    return [] if empty else [Piece(queries, keys, kind)]


def running_sums(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return ``[n + 1]``, the sums of what stands before each of ``n`` values, and of all."""
    found = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=found[1:])
    return found


def _selection(queries: npt.NDArray[np.int64], keys: npt.NDArray[np.int64]) -> Any:
    """Return an index of rows and columns; slices, which make a view, where positions are consecutive."""
    sides = []
    for positions in (queries, keys):
        following = len(positions) > 0 and bool((np.diff(positions) == 1).all())
        sides.append(slice(int(positions[0]), int(positions[-1]) + 1) if following else positions)
    if all(isinstance(side, slice) for side in sides):
        return tuple(sides)
    return np.ix_(queries, keys)
