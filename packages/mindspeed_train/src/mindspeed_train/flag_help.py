"""The whole help of many flags: argparse formats it, the flags come grouped by who owns them."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser
from collections.abc import Sequence
from typing import Any

from mindspeed_core.flags.entries import FlagEntry
from mindspeed_core.flags.help import adopted_help, placeholder


def help_text(entries: Sequence[FlagEntry], prog: str) -> str:
    """Return the text of ``--help``, flags grouped by owner."""
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
