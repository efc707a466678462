"""The machine check of a refusal: it names the flag, the value and the way out."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_core.flags.flag_set import FlagSet
from mindspeed_core.resolver.plan import Problem

_SHOWN = 100


def complaint(problem: Problem, words: Sequence[str], known: FlagSet) -> str:
    """Return what a refusal of a command line fails to say; nothing for a good one."""
    text = str(problem)
    if not problem.remedy.strip():
        return "no way out"
    if not problem.flag:
        # A word before the first flag: it stands for the flag.
        return (
            ""
            if any(repr(word)[1:_SHOWN] in text for word in words if not word.startswith("--"))
            else "no flag"
        )
    named = problem.flag.partition(" ")[0]
    options = known[named].flag.options if named in known else (named,)
    given = [place for place, word in enumerate(words) if _option(word).startswith(options)]
    if not given:
        return "" if named in known else "a flag that is neither given nor known"
    if named not in known or known[named].flag.is_switch or "got " in text:
        return ""
    return "" if any(value in text for place in given for value in _values(words, place)) else "no value"


def _option(word: str) -> str:
    return word.partition("=")[0]


def _values(words: Sequence[str], place: int) -> list[str]:
    """Return the spellings of the values of a flag at a place of the command line."""
    _, inline, first = words[place].partition("=")
    found = []
    for value in (*([first] if inline else []), *words[place + 1 :]):
        if value.startswith("--") and " " not in value and len(value) > 2:
            break
        found += [repr(value)[1:_SHOWN].rstrip("'\""), *_as_numbers(value)]
    return found or [""]


def _as_numbers(value: str) -> list[str]:
    numbers = []
    for kind in (int, float):
        try:
            numbers.append(str(kind(value)))
        except ValueError:
            continue
    return numbers
