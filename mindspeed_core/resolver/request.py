"""A request to the resolver: the arguments and their provenance, and the problems found so far.

A feature whose own code fails although nobody asked for it is left out; one that is asked for is a problem.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_core.discovery.entry_points import describe
from mindspeed_core.feature import Conflict, Feature, Flag, Requirement, dest_of
from mindspeed_core.flags.values import shown_value
from mindspeed_core.platforms.selection import kinds_of
from mindspeed_core.registry import FeatureRecord, Registry
from mindspeed_core.resolver.index import Index
from mindspeed_core.resolver.plan import Problem


@dataclass(eq=False)
class Request:
    """The input of one call of `resolve`, and the problems found so far."""

    index: Index
    registry: Registry
    args: Namespace
    provenance: Mapping[str, str] | None
    platform: str
    host: str
    mode: str
    versions: Mapping[str, str] | None

    def __post_init__(self) -> None:
        self.kinds, self.kind = kinds_of(self.registry, self.platform)
        level = getattr(self.args, "optimization_level", None)
        self.level = 2 if level is None else int(level)
        self.problems: list[Problem] = []
        self.why: dict[str, str] = {}

    def problem(self, code: str, name: str, reason: str, remedy: str = "", flag: str | None = None) -> None:
        """Note a problem of a feature; ``flag`` is by default the one that asks for it, or implies it."""
        given = self.causing_flag(name) if flag is None else flag
        option = given.partition(" ")[0]
        value, _ = self.value(option)
        shown = "" if value is None or isinstance(value, bool) or not option else shown_value(value)
        self.problems.append(Problem(code, reason, remedy, name, given, shown))

    def flag_of(self, name: str) -> str:
        """Return the flag that asks for a feature: the first one given, or the preset that set it."""
        cls = self.index.classes.get(name)
        return asking_flag(cls, self.args, self.provenance) if cls is not None else ""

    def causing_flag(self, name: str) -> str:
        """Return the flag that asks for a feature, or for the one that implies it; empty where none does."""
        chain = self.chain(name)
        return self.flag_of(chain[-1])

    def chain(self, name: str) -> list[str]:
        """Return a feature, the one that implies it or leaves its part to it, and so on to the asked one."""
        chain = [name]
        while not self.flag_of(chain[-1]):
            cause = (
                self.why.get(chain[-1], "default").removeprefix("implied by ").removeprefix("fallback of ")
            )
            if cause not in self.index.classes or cause in chain:
                break
            chain.append(cause)
        return chain

    def failure(self, name: str, method: str, error: BaseException) -> str:
        """Return one sentence about a method of a feature that raised, with the package it is from."""
        return failure(self.index.records[name], method, error)

    def ways_out(self, name: str) -> str:
        """Return what to do about a feature whose own code fails."""
        return ways_out(self.index.records[name], self.flag_of(name))

    def flag_or_name(self, name: str) -> str:
        """Return what the user would drop to be rid of a feature: its flag, or its name without one."""
        return self.causing_flag(name) or name

    def value(self, option: str) -> tuple[Any, bool]:
        """Return the value a flag stands for, and whether the flag turns it off."""
        dest, inverts = self.index.dests.get(option) or (dest_of(option), False)
        return getattr(self.args, dest, None), inverts

    def shown(self, option: str) -> str:
        """Return the value that a flag has, for a message."""
        value, inverts = self.value(option)
        if inverts:
            value = value is not None and not value
        return "not set" if value is None or value is False else repr(value)[:200]

    def holds(self, condition: Requirement | Conflict) -> bool:
        """Return whether a flag has the value that is required, or that is in the way."""
        value, inverts = self.value(condition.flag)
        wanted = condition.one_of or (() if condition.equals is None else (condition.equals,))
        if wanted and isinstance(value, (list, tuple)) and value not in wanted:
            # One offending value of several is in the way; every one of several has to be a required one.
            among = [each in wanted for each in value]
            return any(among) if isinstance(condition, Conflict) else bool(among) and all(among)
        if wanted:
            return value in wanted
        if inverts and isinstance(condition, Conflict) and not self._given(condition.flag):
            # Hosts turn off what is not installed; only a user who turns it off contradicts a feature.
            return False
        return value is not None and bool(value) != inverts

    def stands_for(self, option: str) -> str:
        """Return the flag by which somebody set another one without giving it; empty where it was given."""
        dest = (self.index.dests.get(option) or (dest_of(option), False))[0]
        source = (self.provenance or {}).get(dest, "")
        return self.flag_of(source.removeprefix("preset ")) if source.startswith("preset ") else ""

    def given_as(self, option: str) -> bool:
        """Return whether the user gave a flag by this option string."""
        dest = (self.index.dests.get(option) or ("", False))[0]
        return self.provenance is not None and self.provenance.get(dest) == f"flag {option}"

    def _given(self, option: str) -> bool:
        """Return whether somebody gave a flag; without provenance, every value counts as given."""
        dest = (self.index.dests.get(option) or ("", False))[0]
        return self.provenance is None or self.provenance.get(dest, "default") != "default"


def condition_text(of: Requirement | Conflict) -> str:
    """Return the required, or forbidden, value of a flag as text."""
    if of.one_of:
        return f"{of.flag} {' or '.join(str(value) for value in of.one_of)}"
    return of.flag if of.equals is None else f"{of.flag} {of.equals}"


def parenthesized(reason: str) -> str:
    """Return a reason in brackets, or nothing."""
    return f" ({reason})" if reason else ""


def join_names(names: Sequence[str]) -> str:
    """Join at least two names as a list in a sentence."""
    return f"{', '.join(names[:-1])} and {names[-1]}"


def asking_flag(feature: type[Feature], args: Namespace, provenance: Mapping[str, str] | None) -> str:
    """Return the first flag of a feature that is given, or the preset that set it; empty where none is.

    The host's own choices of a flag that the feature extends do not ask for the feature. Without provenance
    a value that differs from the flag's default counts as given.
    """
    for flag in feature.flags:
        value = getattr(args, flag.dest, flag.default)
        if _is_another_owners(flag, value):
            continue
        if provenance is None:
            if value != flag.default:
                return flag.name
            continue
        source = provenance.get(flag.dest, "default")
        if source.startswith("flag "):
            return source.removeprefix("flag ")
        if source != "default":
            return f"{flag.name} by {source}"
    return ""


def failure(record: FeatureRecord, method: str, error: BaseException) -> str:
    """Return one sentence about a method of a feature that raised, with the package it is from."""
    place = describe(error, record.cls.__module__.partition(".")[0])
    return f"its {method} fails in {record.dist} {record.version}: {place}"


def ways_out(record: FeatureRecord, flag: str) -> str:
    """Return what to do about a feature whose own code fails, and that ``flag`` asks for."""
    drop = f"drop {flag}, or " if flag else ""
    return f"{drop}pip install --upgrade {record.dist}, or report it to its authors"


def _is_another_owners(flag: Flag, value: object) -> bool:
    return bool(flag.choices) and not flag.choices_from and flag.nargs is None and value not in flag.choices
