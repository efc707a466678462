"""Megatron-LM's own flags as declarations: from the recorded table, and from a parser that is there.

The table lets a plan be made without Megatron-LM; inside a training the parser itself is asked, so that flags
of any version and of the script are known. Neither needs torch.
"""

from __future__ import annotations

import re
from argparse import Action, ArgumentParser, BooleanOptionalAction
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mindspeed_core.feature import Flag
from mindspeed_megatron.upstream.megatron_lm_flags import megatron_lm_flags

_TYPES: Mapping[str, Any] = {"int": int, "float": float, "str": str}
_OPTION = re.compile(r"--[A-Za-z0-9][A-Za-z0-9._-]*\Z")


def opaque(text: str) -> str:
    """Keep the text of a value whose type only Megatron-LM can read."""
    return text


def host_flags() -> tuple[Flag, ...]:
    """Return the flags of the recorded version."""
    return tuple(flag for record in megatron_lm_flags()[1] for flag in _of_record(record))


def flags_of(parser: ArgumentParser) -> tuple[Flag, ...]:
    """Return the flags that a parser has."""
    actions = (action for action in parser._actions if action.option_strings and action.dest != "help")
    return tuple(flag for action in actions for flag in _of_action(action))


def options_of(parser: ArgumentParser) -> frozenset[str]:
    """Return every option string of a parser, of whatever form."""
    return frozenset(option for action in parser._actions for option in action.option_strings)


def _of_record(record: Mapping[str, Any]) -> Iterator[Flag]:
    options = record["options"]
    if record["value"] == "switch":
        sets = record.get("sets", not record.get("default"))
        if sets == "either":
            yield from _pair(options, record["dest"], record.get("default"))
        else:
            yield from _switch(options, record["dest"], bool(sets), record.get("default"))
        return
    yield from _valued(
        options,
        record["dest"],
        _TYPES.get(record["value"], opaque),
        nargs=record.get("nargs"),
        default=record.get("default"),
        choices=record.get("choices", ()),
    )


def _of_action(action: Action) -> Iterator[Flag]:
    if isinstance(action, BooleanOptionalAction):
        yield from _pair(action.option_strings, action.dest, action.default)
    elif action.nargs == 0:
        yield from _switch(action.option_strings, action.dest, bool(action.const), action.default)
    else:
        kind = action.type or str
        kind = kind if kind in (int, float, str) else opaque
        plain = all(isinstance(choice, (str, int, float)) for choice in action.choices or ())
        yield from _valued(
            action.option_strings,
            action.dest,
            kind,
            nargs=action.nargs,
            default=action.default,
            choices=tuple(action.choices or ()) if plain and kind is not opaque else (),
        )


def _pair(options: Sequence[str], dest: str, default: Any) -> Iterator[Flag]:
    """Yield a flag and its negation."""
    for negative in (False, True):
        chosen = [option for option in options if option.startswith("--no-") is negative]
        yield from _switch(chosen, dest, not negative, default)


def _switch(options: Sequence[str], dest: str, sets: bool, default: Any) -> Iterator[Flag]:
    names = [option for option in options if _OPTION.match(option)]
    if names:
        yield Flag(
            names[0],
            aliases=tuple(names[1:]),
            dest=dest,
            inverts="" if sets else dest,
            default=bool(default) if default is not None else not sets,
        )


def _valued(
    options: Sequence[str], dest: str, kind: Any, *, nargs: Any, default: Any, choices: Sequence[Any]
) -> Iterator[Flag]:
    names = [option for option in options if _OPTION.match(option)]
    if names:
        known = nargs if nargs in (None, "?", "*", "+") or isinstance(nargs, int) else "*"
        yield Flag(
            names[0],
            aliases=tuple(names[1:]),
            dest=dest,
            type=kind,
            nargs=known,
            default=default,
            choices=() if kind is opaque else tuple(choices),
            allow_nonfinite=True,
        )
