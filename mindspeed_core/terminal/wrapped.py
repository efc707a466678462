"""Text that fits the terminal: wrapped where a person reads it, one line per fact in a pipe.

Chinese, Japanese and Korean characters take two columns, and a line may end between any two of them.
"""

from __future__ import annotations

import shutil
import sys
from unicodedata import combining, east_asian_width

from mindspeed_core.terminal.foreign_text import clean


def columns() -> int | None:
    """Return the width of the terminal; None in a pipe or a file, where no line is too long."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def width(text: str) -> int:
    """Return the columns that a text takes on a terminal."""
    return sum(map(_cells, text))


def ljust(text: str, columns: int) -> str:
    """Return a text with spaces behind it up to a width in columns."""
    return text + " " * (columns - width(text))


def words(text: str) -> list[str]:
    """Return the pieces between which a line may end, each with the spaces before it."""
    found: list[str] = []
    before = ""
    for character in text:
        at_space = character == " " and before != " "
        at_wide = before != " " and 2 in (_cells(character), _cells(before))
        if not found or at_space or at_wide:
            found.append("")
        found[-1] += character
        before = character
    return found


def wrap(text: str, columns: int) -> list[str]:
    """Return a text as lines of at most so many columns; a longer word is cut."""
    lines = [""]
    for word in words(text):
        if lines[-1] and width(lines[-1] + word) > columns:
            lines.append("")
            word = word.lstrip(" ")
        for character in word:
            if lines[-1] and width(lines[-1] + character) > columns:
                lines.append("")
            lines[-1] += character
    return lines


def say(text: str, *, indent: int = 0, hang: int = 0) -> None:
    """Print one paragraph.

    Args:
        text: without line breaks.
        indent: spaces before every line.
        hang: further spaces before every line but the first.
    """
    text, limit = clean(text), columns()
    room = None if limit is None else limit - indent - hang
    if room is None or room < 10:
        print(" " * indent + text)
        return
    first, *others = wrap(text, room + hang)
    print(" " * indent + first)
    for line in wrap(text[len(first) :].lstrip(" "), room) if others else ():
        print(" " * (indent + hang) + line)


def _cells(character: str) -> int:
    if not character or combining(character):
        return 0
    return 2 if east_asian_width(character) in "WF" else 1
