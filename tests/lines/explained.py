"""The machine check of a refusal: it names the flag, the value and the way out."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_core.feature import Flag
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
    if named not in known:
        # The start of a long word is enough; what cannot be printed is escaped.
        given_here = any(repr(_option(word))[1:].startswith(named) for word in words)
        return "" if given_here else "a flag that is neither given nor known"
    flag = known[named].flag
    given = [place for place, word in enumerate(words) if _option(word) in flag.options]
    if not given or flag.is_switch or "got " in text:
        return ""
    values = [value for place in given for value in _values(words, place, flag)]
    return "" if any(value in text for value in values) else "no value"


def _option(word: str) -> str:
    return word.partition("=")[0]


def _values(words: Sequence[str], place: int, flag: Flag) -> list[str]:
    """Return the spellings of the values of a flag at a place of the command line: as given, and as read."""
    _, inline, first = words[place].partition("=")
    found = []
    for value in (*([first] if inline else []), *words[place + 1 :]):
        if value.startswith("--") and " " not in value and len(value) > 2:
            break
        found += [repr(value)[1:_SHOWN].rstrip("'\""), *_as_read(value, flag)]
    return found or [""]


def _as_read(value: str, flag: Flag) -> list[str]:
    found = []
    for kind in (int, float, flag.type):
        try:
            read = kind(value)
        except Exception:
            # The type of a flag raises what it likes; the value has been refused, then.
            continue
        found += [str(read), " ".join(map(str, read)) if isinstance(read, list) else str(read)]
    return found
