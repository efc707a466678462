"""Ways out of problems as one types them: a flag together with a value."""

from __future__ import annotations

from typing import Any

from mindspeed_core.feature import Conflict, Feature, Flag, Requirement

_SHOWN = 6


def to_ask_for(feature: type[Feature]) -> str:
    """Return how to switch a feature on: its first flag with a value that its proofs use."""
    if not feature.flags:
        return f"switch {feature.name} on"
    flag = feature.flags[0]
    if flag.is_switch:
        return f"add {flag.name}"
    proven = [
        value
        for scenario in feature.verify
        for given, value in zip(scenario.flags, scenario.flags[1:])
        if given in flag.options and not value.startswith("--")
    ]
    value = flag.choices[0] if flag.choices else proven[0] if proven else _any_value(flag)
    return f"add {flag.name} {value}"


def to_meet(requirement: Requirement, flag: Flag | None) -> str:
    """Return what to type for a required value of a flag; ``flag`` is None where the host lacks it."""
    name, wanted = requirement.flag, _values(requirement)
    if flag is not None and flag.is_switch:
        # The switch itself sets its destination to True, or to False where it inverts.
        return f"{'add' if not wanted or bool(wanted[0]) is not bool(flag.inverts) else 'drop'} {name}"
    if wanted:
        return f"set {' or '.join(f'{name} {value}' for value in wanted)}"
    return f"set {name} {_any_value(flag) if flag is not None else 'VALUE'}"


def to_avoid(conflict: Conflict, flag: Flag | None) -> str:
    """Return what to type instead of a value of a flag that is in the way."""
    name, bad = conflict.flag, _values(conflict)
    if flag is None or flag.is_switch or not bad:
        return f"drop {name}"
    good = [choice for choice in flag.choices if choice not in bad][:_SHOWN]
    if good:
        return f"set {name} {' or '.join(map(str, good))}"
    return f"drop {name}" if flag.default in (None, *bad) else f"set {name} {flag.default}"


def _values(of: Requirement | Conflict) -> tuple[Any, ...]:
    return of.one_of or (() if of.equals is None else (of.equals,))


def _any_value(flag: Flag) -> str:
    from mindspeed_core.flags.help import placeholder

    return " or ".join(map(str, flag.choices[:_SHOWN])) or placeholder(flag)
