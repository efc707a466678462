"""Sentences about flags of a launch script that change nothing here, or are read as others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LEAVE_OUT = "leave it out"
_SHOWN = 4
_WHERE = "--explain, or `mindspeed-features plan`, says why"


@dataclass(frozen=True)
class FlagNote:
    """A note on one given flag.

    Attributes:
        flag: the flag as it was given.
        reason: why it changes nothing, or why it means the same.
        read_as: what is read instead; empty where the flag changes nothing.
    """

    flag: str
    reason: str = ""
    read_as: str = ""

    def __str__(self) -> str:
        """Return one line."""
        if not self.read_as:
            return f"{self.flag} changes nothing here: {self.reason}"
        return f"{self.flag} is read as {self.read_as}" + (f": {self.reason}" if self.reason else "")


def lines(notes: Sequence[FlagNote], *, explain: bool) -> Iterator[str]:
    """Yield what a run prints: all of it with ``explain``, else one line for each kind of note."""
    if explain:
        yield from map(str, notes)
        return
    idle = [note.flag.partition(" ")[0] for note in notes if not note.read_as]
    if len(idle) == 1:
        yield str(next(note for note in notes if not note.read_as))
    elif idle:
        yield f"{len(idle)} flags change nothing here: {_names(idle)} ({_WHERE})"
    read = [note for note in notes if note.read_as]
    if len(read) == 1:
        yield str(read[0])
    elif read:
        flags = _names([note.flag.partition(" ")[0] for note in read])
        yield f"{len(read)} flags are read as others: {flags} ({_WHERE})"


def _names(flags: Sequence[str]) -> str:
    names = list(dict.fromkeys(flags))
    more = len(names) - _SHOWN
    if more <= 1:
        return ", ".join(names)
    return f"{', '.join(names[:_SHOWN])} and {more} more"
