"""Text and lists on a terminal, as wide as it is and with colours; in a pipe columns separated by tabs.

A terminal shows what fits into its width: columns are aligned, and text that is too long ends in an ellipsis.
A pipe gets every cell whole, so that ``cut``, ``awk -F'\\t'`` and spreadsheets read the same columns whatever
the longest cell is, and a paragraph in one line. Chinese, Japanese and Korean characters take two columns,
and a line may end between any two of them. Colours follow ``NO_COLOR`` and ``FORCE_COLOR``
(https://no-color.org) and need no rich.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple, TextIO
from unicodedata import combining, east_asian_width

from mindspeed_core.terminal.foreign_text import clean, emit

SEVERITIES = {"ok": "good", "note": "name", "warning": "warning", "error": "bad"}
"""Words that begin a message, and their styles."""
_BEGINNING = re.compile(rf"^({'|'.join(SEVERITIES)}):", re.MULTILINE)
_COMMAND = re.compile(r" *-> (mindspeed-|pip |python|torchrun |nox |export |[A-Z_]+=)")
"""Begins a remedy that is typed as it stands."""
_CODES = {
    "bold": "1",
    "dim": "2",
    "good": "32",
    "warning": "33",
    "bad": "31",
    "name": "36",
}
_GAP = 2
_ENDLESS = 1 << 20
_WIDEST = 40
"""Columns that a cell may always take while others follow it; on a wide terminal it may take half of it."""


class Cell(NamedTuple):
    """A text with its style: bold, dim, good, warning, bad or name; empty for none."""

    text: str
    style: str = ""


def columns(stream: TextIO | None = None) -> int | None:
    """Return the width of a terminal, by default of standard output; None in a pipe: no line is too long."""
    stream, own = stream or sys.stdout, 0
    if stream.closed or not stream.isatty():
        return None
    with suppress(OSError, ValueError):
        own = os.get_terminal_size(stream.fileno()).columns
    from shutil import get_terminal_size

    return get_terminal_size((own or 80, 24)).columns


def width(text: str) -> int:
    """Return the columns that a text takes on a terminal."""
    return sum(map(_cells, text))


def ljust(text: str, columns: int) -> str:
    """Return a text with spaces behind it up to a width in columns."""
    return text + " " * (columns - width(text))


def words(text: str) -> list[str]:
    """Return the pieces between which a line may end, each with the spaces before it."""
    pieces: list[str] = []
    before = ""
    for character in text:
        at_space = character == " " and before != " "
        at_wide = before != " " and 2 in (_cells(character), _cells(before))
        if not pieces or at_space or at_wide:
            pieces.append("")
        pieces[-1] += character
        before = character
    return pieces


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


def for_terminal(text: str, stream: TextIO) -> str:
    """Return a message as a stream shows it: lines wrapped between words, words of `SEVERITIES` in colour.

    A word that is longer than the terminal is wide stays whole, so that it can be copied; so does a remedy
    that is a command.
    """
    text, limit = clean(text, lines=True), columns(stream)
    if limit is not None:
        text = "\n".join(_unbroken(line, limit) for line in text.split("\n"))
    return _BEGINNING.sub(lambda found: paint(found[0], SEVERITIES[found[1]], stream), text)


def print_message(text: str, stream: TextIO | None = None) -> None:
    """Print a message, on standard error by default; see `for_terminal`."""
    stream = stream or sys.stderr
    print(for_terminal(text, stream), file=stream, flush=True)


def _unbroken(line: str, limit: int) -> str:
    behind = " " * (len(line) - len(line.lstrip()) + 4)
    if width(line) <= limit or _COMMAND.match(line) or len(behind) > limit // 2:
        return line
    lines = [""]
    for word in words(line):
        if lines[-1].strip() and width(lines[-1] + word) > limit:
            lines.append(behind)
            word = word.lstrip(" ")
        lines[-1] += word
    return "\n".join(lines)


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


def print_rows(rows: Sequence[Sequence[Cell | str]], *, indent: int = 0, tabs: bool = True) -> None:
    """Print rows of the same number of cells, one line each.

    Args:
        rows: their cells, shown without line breaks.
        indent: spaces before every aligned line.
        tabs: separate cells by tabs in a pipe; False aligns them there too, for short cells inside of prose.
    """
    lines = [[_cleaned(cell) for cell in row] for row in rows]
    limit = columns()
    if limit is None and tabs:
        for line in lines:
            _write("\t".join(cell.text for cell in line))
        return
    room = _ENDLESS if limit is None else limit
    widest = max(_WIDEST, room // 2)
    widths = [min(max(width(cell.text) for cell in column), widest) for column in zip(*lines)]
    for line in lines:
        _write(_aligned(line, widths, indent, room))


def print_heading(text: str, note: str = "") -> None:
    """Print a heading in bold, with a dim note behind it."""
    limit = columns()
    heading = Cell(clean(text), "bold")
    if limit is None:
        _write(f"{heading.text}{'  ' + clean(note) if note else ''}")
        return
    cells = [heading, Cell(clean(note), "dim")] if note else [heading]
    _write(_aligned(cells, [width(heading.text), 0], 0, limit))


def print_section(title: str, lines: Iterable[str]) -> None:
    """Print an empty line, a heading and indented lines; nothing where there are no lines.

    What is wrapped goes on at the line's own indentation.
    """
    lines = list(lines)
    if lines:
        emit()
        print_heading(title)
        for line in lines:
            say(line, indent=2, hang=2 + len(line) - len(line.lstrip()))


def print_labelled(
    label: str, cell: Cell | str, *, wide: int = 8, style: str = "dim", indent: int = 0
) -> None:
    """Print a fact behind its label, wrapped to the terminal.

    Args:
        label: at most ``wide`` columns; empty to go on with the fact above.
        cell: the fact.
        wide: columns of the label.
        style: of the label.
        indent: spaces before every line.
    """
    fact, limit, before = _cleaned(cell), columns(), " " * indent
    if limit is None:
        _write(f"{before}{clean(label):<{wide}}  {fact.text}".rstrip())
        return
    room = max(limit - indent - wide - _GAP, 10)
    for number, line in enumerate(wrap(fact.text, room)):
        shown = f"{clean(label) if number == 0 else '':<{wide}}"
        _write(before + paint(shown, style) + " " * _GAP + paint(line.lstrip(" "), fact.style))


def print_hint(text: str) -> None:
    """Print a dim paragraph: how to see more."""
    if not _colours():
        say(text)
        return
    sys.stdout.write("\x1b[2m")
    say(text)
    sys.stdout.write("\x1b[0m")
    sys.stdout.flush()


def cut(text: str, limit: int) -> str:
    """Return a text of at most so many columns; a longer one ends in an ellipsis."""
    if width(text) <= limit:
        return text
    end = "…" if _writes("…") else "..."
    if limit <= len(end):
        return end[:limit]
    kept = ""
    for character in text:
        if width(kept + character) > limit - len(end):
            break
        kept += character
    return kept.rstrip() + end


def paint(text: str, style: str, stream: TextIO | None = None) -> str:
    """Return a cleaned text in a style; as it is where a stream, or standard output, takes no colours."""
    if not style or not text or not _colours(stream):
        return text
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m"


def _aligned(line: Sequence[Cell], widths: Sequence[int], indent: int, limit: int) -> str:
    """Return one line of at most ``limit`` columns; the last cell takes what the others leave."""
    written, used = " " * min(indent, limit), min(indent, limit)
    for number, (cell, wide) in enumerate(zip(line, widths)):
        last = number == len(line) - 1
        gap = _GAP if number else 0
        room = limit - used - gap
        if room <= 0 or not any(rest.text for rest in line[number:]):
            break
        text = cut(cell.text, room if last else min(wide, room))
        padding = 0 if last else max(0, min(wide, room) - width(text))
        written += " " * gap + paint(text, cell.style) + " " * padding
        used += gap + width(text) + padding
    return written.rstrip(" ")


def _cleaned(cell: Cell | str) -> Cell:
    whole = cell if isinstance(cell, Cell) else Cell(cell)
    return Cell(clean(whole.text), whole.style)


def _colours(stream: TextIO | None = None) -> bool:
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR") or os.environ.get("CLICOLOR_FORCE"):
        return True
    return columns(stream) is not None and os.environ.get("TERM", "dumb") != "dumb"


def _writes(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def _write(line: str) -> None:
    # The cells were cleaned; what else is in the line are colours of ours.
    print(line, flush=True)


def _cells(character: str) -> int:
    if not character or combining(character):
        return 0
    return 2 if east_asian_width(character) in "WF" else 1
