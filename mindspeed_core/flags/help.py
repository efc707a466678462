"""Words for a flag in messages and ``--help`` of every program: its placeholder, and who else uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_core.feature import Flag
from mindspeed_core.flags.entries import FlagEntry


def placeholder(flag: Flag) -> str:
    """Return the placeholder of a flag's value in help and messages."""
    if flag.metavar:
        return flag.metavar
    if flag.choices:
        joined = ",".join(str(choice) for choice in flag.choices)
        return "{" + joined + "}" if len(joined) <= 60 else "CHOICE"
    letters: dict[Callable[..., Any], str] = {int: "N", float: "X", str: "TEXT"}
    return letters.get(flag.type, "VALUE")


def adopted_help(entry: FlagEntry) -> list[str]:
    """Return what features that adopted a flag say about it, in brackets: their own help and default."""
    known = entry.flag
    users: dict[str, list[str]] = {}
    for adoption in entry.adoptions:
        flag = adoption.flag
        own = [flag.help] if flag.help not in ("", known.help) else []
        if not flag.is_switch and flag.default not in (None, known.default):
            own.append(f"default {flag.default}")
        users.setdefault("; ".join(own), []).append(adoption.owner)
    return [
        f"({', '.join(owners)}: {own})" if own else f"(also used by {', '.join(owners)})"
        for own, owners in users.items()
    ]
