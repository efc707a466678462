"""Cleaning of text that is not ours, before a terminal, a log, Markdown or HTML shows it.

Names in indexes, plans, layouts and models, versions of packages and messages of exceptions come from files
and plugins. A terminal obeys escape sequences in them, a browser their tags, and a reader is deceived by
characters that reverse or hide what stands beside them.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from typing import TextIO

_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Categories of characters that control, hide or reorder text, or that nobody can see."""
_JOINERS = "\u200c\u200d"
"""Of them, what Persian, Indic scripts and emoji are spelled with; they join or part their neighbours."""
_MARKDOWN = re.compile(r"[\\`*\[\]|~$]|(?<![^\W_])_|_(?![^\W_])|^\s*[#+\->=:]|^\s*\d+[.)](?=\s|$)")
"""Marks of Markdown in a line: everywhere those of spans, and at its begin those of blocks."""
_LIMIT = 300


def clean(text: object, *, lines: bool = False) -> str:
    """Return text in which every character is visible; others are written as ``\\x1b`` or ``\\u202e``.

    Args:
        text: a foreign text, or a value whose ``str`` holds one.
        lines: keep line breaks and tabs.
    """
    original = text if isinstance(text, str) else _text_of(text)
    if original.isascii() and original.isprintable():
        return original
    kept = "\n\t" if lines else ""
    return "".join(
        character if character in kept or not _is_hidden(character) else _escaped(character)
        for character in original
    )


def emit(text: object = "", *, err: bool = False, file: TextIO | None = None) -> None:
    """Print text with foreign parts in it, on standard output by default."""
    print(clean(text, lines=True), file=file or (sys.stderr if err else sys.stdout), flush=True)


def shown(text: object, limit: int = _LIMIT) -> str:
    """Return a foreign text in one line of at most ``limit`` characters, for a message."""
    original = text if isinstance(text, str) else _text_of(text)
    cleaned = clean(original[: limit + 1])
    return cleaned if len(cleaned) <= limit else cleaned[: limit - 1] + "…"


def first_line(error: BaseException, limit: int = _LIMIT) -> str:
    """Return the first line of an exception's message, cleaned; its type where it has none."""
    lines = _text_of(error).strip().splitlines()
    return shown(lines[0], limit) if lines else type(error).__name__


def for_markdown(text: object) -> str:
    """Return a foreign text as literal text of one line of Markdown, also in a cell of a table."""
    cleaned = clean(text).replace("&", "&amp;").replace("<", "&lt;")
    return _MARKDOWN.sub(lambda mark: f"{mark[0][:-1]}\\{mark[0][-1]}", cleaned)


def for_html(text: object) -> str:
    """Return a foreign text as literal text of HTML, also inside of a quoted attribute."""
    from html import escape

    return escape(clean(text), quote=True)


def _text_of(value: object) -> str:
    try:
        return str(value)
    except Exception as error:
        # Messages are made when something is wrong already.
        return f"<{type(value).__name__} whose text cannot be made: {type(error).__name__}>"


def _is_hidden(character: str) -> bool:
    return unicodedata.category(character) in _HIDDEN and character not in _JOINERS


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
