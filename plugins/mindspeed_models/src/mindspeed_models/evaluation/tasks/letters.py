"""Questions with lettered options: prompts, examples, and the letter in a generated answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

LETTERS = "ABCD"
_SEED_LINE = re.compile(r".*[A|B|C|D]\..*")
_SEED_LETTER = re.compile(r"[A|B|C|D]")


def lettered(options: Sequence[str]) -> str:
    """Return options below each other, each with its letter."""
    return "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, options))


def seed_letter(text: str) -> str:
    """Return the letter that the seed finds in an answer, or nothing.

    It takes the first line with a letter and a full stop, and of it the first letter; its character classes
    hold ``|``, too, which is kept.
    """
    line = _SEED_LINE.search(text)
    letter = _SEED_LETTER.search(line.group()) if line else None
    return letter.group() if letter else ""
