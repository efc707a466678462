"""Suggestions for misspelled names of declarations."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def guess(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` where a known name is spelled like ``name``, otherwise nothing."""
    close = get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
