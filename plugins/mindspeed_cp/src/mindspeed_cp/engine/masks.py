"""Which keys a query sees, as a rule about global positions: pure index arithmetic.

A rule cuts any rectangle of queries and keys into pieces that a kernel computes: whole rectangles, squares
under a causal mask, and, only where a window or a given matrix crosses them, rectangles with a mask.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mindspeed_cp.engine.layout import Interval, union

FULL, CAUSAL, MASKED = "full", "causal", "masked"


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
    """Which scores of a sequence count.

    Attributes:
        length: positions of the sequence.
        causal: a query sees no later key.
        ends: running ends of documents that do not see one another; empty for one document.
        window: a query sees at most this many keys before its own; None for all of them.
        prefix: the first keys that every query of the sequence sees.
        matrix: ``[s, s]`` bool, True where a score counts; on top of everything else.
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

    def __hash__(self) -> int:
        return hash(self.signature())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MaskRule) and self.signature() == other.signature()

    def signature(self) -> tuple[object, ...]:
        """What two equal rules have in common."""
        return (self.length, self.causal, self.ends, self.window, self.prefix, self._matrix_key())

    def _matrix_key(self) -> bytes:
        return b"" if self.matrix is None else np.packbits(self.matrix).tobytes()

    def visible(self, queries: npt.NDArray[np.int64], keys: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """``[q, k]``: which of these positions see one another."""
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
            seen &= self.matrix[np.ix_(queries, keys)]
        return seen

    def pieces(self, queries: Interval, keys: Interval) -> list[Piece]:
        """What has to be computed of a rectangle; every visible score is in exactly one piece."""
        found: list[Piece] = []
        for q, k in self._inside_documents(queries, keys):
            if self.prefix:
                head = (k[0], min(k[1], max(k[0], self.prefix)))
                if head[1] > head[0]:
                    found.append(Piece(q, head, FULL))
                k = (max(k[0], head[1]), k[1])
            found += self._triangle(q, k) if self.causal else _rectangle(q, k, FULL)
        if self.window is not None:
            found = [cut for piece in found for cut in self._windowed(piece)]
        if self.matrix is not None:
            found = [cut for piece in found for cut in self._given(piece)]
        return found

    def _inside_documents(self, queries: Interval, keys: Interval) -> Iterator[tuple[Interval, Interval]]:
        if not self.ends:
            yield queries, keys
            return
        index = bisect_right(self.ends, max(queries[0], keys[0]))
        start = self.ends[index - 1] if index else 0
        for end in self.ends[index:]:
            if start >= min(queries[1], keys[1]):
                return
            q, k = (max(queries[0], start), min(queries[1], end)), (max(keys[0], start), min(keys[1], end))
            if q[1] > q[0] and k[1] > k[0]:
                yield q, k
            start = end

    @staticmethod
    def _triangle(queries: Interval, keys: Interval) -> list[Piece]:
        """A rectangle below the diagonal: what is whole, and the square that the diagonal crosses."""
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
        (a, b), (c, d) = piece.queries, piece.keys
        ahead = 0 if self.causal else self.window
        c, d = max(c, a - self.window), min(d, b + ahead)
        a, b = max(a, c - ahead), min(b, d + self.window)
        if a >= b or c >= d:
            return []
        inside = c >= b - 1 - self.window and (self.causal or d - 1 <= a + self.window)
        if inside and (piece.kind == FULL or (a, b) == (c, d)):
            return [Piece((a, b), (c, d), piece.kind)]
        return [Piece((a, b), (c, d), MASKED)]

    def _given(self, piece: Piece) -> list[Piece]:
        assert self.matrix is not None
        inside = self.matrix[slice(*piece.queries), slice(*piece.keys)]
        if inside.all():
            return [piece]
        rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
        if not len(rows):
            return []
        queries = (piece.queries[0] + int(rows[0]), piece.queries[0] + int(rows[-1]) + 1)
        keys = (piece.keys[0] + int(columns[0]), piece.keys[0] + int(columns[-1]) + 1)
        return [Piece(queries, keys, MASKED)]

    def pairs(self, queries: Interval, keys: Interval | None = None) -> int:
        """How many scores of a rectangle count."""
        total = 0
        for piece in self.pieces(queries, keys or (0, self.length)):
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
        if self.matrix is None and self.window is not None:
            rows = np.arange(a, b)
            low = np.maximum(c, rows - self.window)
            high = np.minimum(d, rows + 1 if self.causal else rows + self.window + 1)
            return int(np.maximum(high - low, 0).sum())
        return int(self.visible(np.arange(a, b), np.arange(c, d)).sum())

    def needed_keys(self, queries: Sequence[Interval]) -> list[Interval]:
        """Keys that some of these queries may see, as disjoint rising intervals."""
        everything = (0, self.length)
        return union(piece.keys for interval in queries for piece in self.pieces(interval, everything))


def _rectangle(queries: Interval, keys: Interval, kind: str) -> list[Piece]:
    empty = queries[1] <= queries[0] or keys[1] <= keys[0]
    return [] if empty else [Piece(queries, keys, kind)]
