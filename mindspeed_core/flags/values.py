"""Values of flags: from text to the flag's type, and how values and types are shown in messages."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from mindspeed_core.errors import RefusedValue as RefusedValue
from mindspeed_core.feature import Flag
from mindspeed_core.resolver.plan import Problem

SHOWN = 200
"""Characters of a value that a message repeats."""
_LARGEST = 2**63
_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})


def least_values(flag: Flag) -> int:
    """Return the least number of values a flag takes."""
    if flag.is_switch:
        return 0
    if isinstance(flag.nargs, int):
        return flag.nargs
    return {None: 1, "?": 0, "*": 0, "+": 1}[flag.nargs]


def most_values(flag: Flag) -> int | None:
    """Return the largest number of values a flag takes; None for any number."""
    if flag.is_switch:
        return 0
    if isinstance(flag.nargs, int):
        return flag.nargs
    return {None: 1, "?": 1, "*": None, "+": None}[flag.nargs]


def arity(flag: Flag) -> str:
    """Describe the number of values a flag takes."""
    least, most = least_values(flag), most_values(flag)
    if least == most:
        return "one value" if least == 1 else f"{least} values"
    return "at least one value" if least else ("at most one value" if most == 1 else "any number of values")


def typed(flag: Flag, value: Any) -> Any:
    """Convert a value, text or already typed, into the flag's type."""
    kind = flag.type
    if kind is bool:
        truth = truth_of(value)
        if truth is None:
            raise RefusedValue("neither true nor false")
        return truth
    if not isinstance(value, str):
        return _typed_value(flag, value)
    if kind is int:
        if len(value) > 40:
            raise RefusedValue("not an integer of 64 bits")
        return _checked_int(int(value), value)
    if kind is float:
        return _checked_float(flag, float(value))
    return kind(value)


def _typed_value(flag: Flag, value: Any) -> Any:
    kind = flag.type
    if kind is int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise RefusedValue(f"a {type(value).__name__}, not an integer")
        return _checked_int(value, value)
    if kind is float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise RefusedValue(f"a {type(value).__name__}, not a number")
        return _checked_float(flag, float(value))
    if kind is str:
        if not hasattr(value, "__fspath__"):
            raise RefusedValue(f"a {type(value).__name__}, not text")
        return str(value)
    return value


def _checked_int(number: int, value: Any) -> int:
    if not -_LARGEST <= number < _LARGEST:
        raise RefusedValue("does not fit into 64 bits")
    return number


def _checked_float(flag: Flag, number: float) -> float:
    if not flag.allow_nonfinite and not math.isfinite(number):
        raise RefusedValue("not a finite number")
    return number


def truth_of(value: Any) -> bool | None:
    """Return a switch's value as a boolean; None when it is neither true nor false."""
    if isinstance(value, bool):
        return value
    text = str(value).lower() if isinstance(value, (str, int)) else ""
    return True if text in _TRUE else False if text in _FALSE else None


def bad_value(option: str, value: Any, reason: str, remedy: str) -> Problem:
    """Return the problem of a flag with a value that cannot be used, and the way out."""
    return Problem("E-FLAG-VALUE", f"{shown_value(value)}: {reason}", remedy, flag=option)


def shown_value(value: Any) -> str:
    """Return a value as a message shows it: cut and printable; never raise."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    # Lone surrogates, which undecodable bytes of a command line turn into, cannot be printed.
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def shown_option(option: str) -> str:
    """Return an option string as a message shows it: cut and printable, without quotes."""
    return repr(option)[1:-1][:SHOWN]


def way_out(flag: Flag, option: str) -> str:
    """Say what to write for a flag instead of a value that it cannot take."""
    if flag.is_switch:
        return f"write {option} alone, or leave it out"
    if flag.choices:
        return f"choose one of {', '.join(map(str, flag.choices))}"
    ways: dict[Callable[..., Any], str] = {
        int: f"write a whole number of 64 bits, for instance {option} 4",
        float: f"write a finite number, for instance {option} 0.1",
        str: f"write {option} TEXT",
    }
    return ways.get(flag.type, f"write what its help says, or leave {option} out")


def type_name(flag: Flag) -> str:
    """Describe the kind of value a flag takes."""
    names: dict[Callable[..., Any], str] = {int: "whole number", float: "number", str: "text", bool: "switch"}
    return names.get(flag.type) or f"value {getattr(flag.type, '__name__', 'this flag accepts')!s} accepts"


def kind_of_flag(flag: Flag) -> str:
    """Describe kind, arity, inversion and destination of a flag."""
    kind = "a switch" if flag.is_switch else f"a {type_name(flag)}"
    nargs = f" with {arity(flag)}" if flag.nargs is not None else ""
    inverts = f" that turns off {flag.inverts}" if flag.inverts else ""
    return f"{kind}{nargs}{inverts} stored in {flag.dest}"
