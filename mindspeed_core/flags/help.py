"""The text of ``--help``: argparse formats it, the flags come grouped by who owns them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mindspeed_core.feature import Flag
from mindspeed_core.flags.entries import FlagEntry


def help_text(entries: Sequence[FlagEntry], prog: str) -> str:
    """Return the text of ``--help``, flags grouped by owner."""
    from argparse import SUPPRESS, ArgumentParser

    # The program says how it is used before it prints this.
    parser = ArgumentParser(prog=prog, allow_abbrev=False, add_help=False, usage=SUPPRESS)
    groups: dict[str, Any] = {}
    for entry in entries:
        if entry.heading not in groups:
            groups[entry.heading] = parser.add_argument_group(_escape(entry.heading))
        flag = entry.flag
        options: dict[str, Any] = {"dest": f"flag_{len(groups)}_{flag.dest}", "help": _help(entry)}
        if flag.is_switch:
            options["action"] = "store_true"
        else:
            options["nargs"] = flag.nargs
            options["metavar"] = placeholder(flag)
        groups[entry.heading].add_argument(*flag.options, **options)
    return parser.format_help()


def placeholder(flag: Flag) -> str:
    """Return the placeholder of a flag's value in help and messages."""
    if flag.metavar:
        return flag.metavar
    if flag.choices:
        joined = ",".join(str(choice) for choice in flag.choices)
        return "{" + joined + "}" if len(joined) <= 60 else "CHOICE"
    letters: dict[Callable[..., Any], str] = {int: "N", float: "X", str: "TEXT"}
    return letters.get(flag.type, "VALUE")


def _escape(text: str) -> str:
    return text.replace("%", "%%")


def _help(entry: FlagEntry) -> str:
    flag = entry.flag
    parts = [flag.help or "-"]
    if not flag.is_switch and flag.default not in (None, ""):
        several = isinstance(flag.default, (list, tuple))
        shown = " ".join(map(str, flag.default)) if several else flag.default
        parts.append(f"(default: {shown})")
    if flag.choices and placeholder(flag) == "CHOICE":
        parts.append(f"(one of: {', '.join(str(choice) for choice in flag.choices)})")
    return _escape(" ".join([*parts, *entry.notes, *adopted_help(entry)]))


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
