"""Ways out of problems as one types them: a flag together with a value."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from mindspeed_core.feature import Conflict, Feature, Flag, Requirement
from mindspeed_core.flags.values import typed

_SHOWN = 6


def to_ask_for(feature: type[Feature], args: Namespace | None = None, besides: Flag | None = None) -> str:
    """Return how to switch a feature on, by a flag with a value that its proofs use.

    Args:
        feature: the feature.
        args: the arguments there are: the first of its flags that switches the feature on beside them is
            named, since that is not its first one everywhere.
        besides: a flag that is given already and does not switch it on.
    """
    if not feature.flags:
        return f"switch {feature.name} on"
    others = [flag for flag in feature.flags if besides is None or flag.dest != besides.dest]
    for flag in others if args is not None else ():
        for text, value in candidates(feature, flag):
            if _enables(feature, Namespace(**{**vars(args), flag.dest: value})):
                return f"add {f'{flag.name} {text}'.rstrip()}"
    if besides is not None and not others:
        return ""
    flag = (others or feature.flags)[0]
    text, _ = next(iter(candidates(feature, flag)), (_any_value(flag), None))
    return f"add {f'{flag.name} {text}'.rstrip()}"


def candidates(feature: type[Feature], flag: Flag) -> list[tuple[str, Any]]:
    """Return values to switch a feature on with, as typed and as read: those of its proofs, then choices."""
    if flag.is_switch:
        return [("", not flag.inverts)]
    found: list[tuple[str, Any]] = []
    for scenario in feature.verify:
        for given, text in zip(scenario.flags, scenario.flags[1:]):
            if given in flag.options and not text.startswith("--"):
                try:
                    value = typed(flag, text)
                except Exception:
                    continue
                found.append((text, value if flag.nargs is None else [value]))
    found += [(str(choice), choice) for choice in flag.choices]
    return [(text, value) for text, value in found if value != flag.default]


def _enables(feature: type[Feature], args: Namespace) -> bool:
    try:
        return bool(feature.enabled(args))
    except (Exception, SystemExit):
        return False


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
