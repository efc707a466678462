"""Lines that a run prints about flags of a launch script that change nothing, or are read as others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mindspeed_core.flags.notes import FlagNote

_SHOWN = 4
_WHERE = "--explain, or `mindspeed-features plan`, says why"


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
