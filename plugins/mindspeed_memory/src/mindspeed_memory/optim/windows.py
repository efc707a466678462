"""Flat parameters cut into windows: which elements of which parameters are updated together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """A range of one parameter.

    Attributes:
        index: of the parameter.
        start: its first element.
        stop: the element behind its last.
    """

    index: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return self.stop - self.start


Window = tuple[Piece, ...]


def windows(
    sizes: Sequence[int], limit: int, align: int = 1, leads: Sequence[int] | None = None
) -> list[Window]:
    """Cut parameters, one behind the other, into windows of at most ``limit`` elements.

    Args:
        sizes: elements of each parameter.
        limit: the most elements of a window.
        align: a parameter is cut at multiples of this many of its own elements; at most ``limit``.
        leads: elements that are counted before the first one of each parameter, less than ``align``; by
            default none.

    Raises:
        ValueError: ``limit`` is less than ``align``.
    """
    if not 1 <= align <= limit:
        raise ValueError(f"windows of {limit} elements cannot be cut at multiples of {align}")
    found: list[Window] = []
    current: list[Piece] = []
    room = limit
    for index, size in enumerate(sizes):
        start, lead = 0, 0 if leads is None else leads[index]
        while start < size:
            border = (lead + start + room) // align * align - lead
            taken = size - start if size - start <= room else border - start
            if taken > 0:
                current.append(Piece(index, start, start + taken))
                start, room = start + taken, room - taken
            if start < size:
                found.append(tuple(current))
                current, room = [], limit
    if current:
        found.append(tuple(current))
    return found


def cut(window: Window, limit: int, align: int = 1, leads: Sequence[int] | None = None) -> Iterator[Window]:
    """Yield the parts of a window that have at most ``limit`` elements each, in order.

    Args:
        window: what is cut.
        limit: the most elements of a part.
        align: as in `windows`.
        leads: those of the parameters, as in `windows`.
    """
    before = [((leads[piece.index] if leads else 0) + piece.start) % align for piece in window]
    for part in windows([piece.size for piece in window], limit, align, before):
        yield tuple(
            Piece(
                window[piece.index].index,
                window[piece.index].start + piece.start,
                window[piece.index].start + piece.stop,
            )
            for piece in part
        )
