"""The values of one command line as far as they are read: each converted to its flag's type, or a problem."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mindspeed_core.discovery.entry_points import describe
from mindspeed_core.feature import Flag
from mindspeed_core.flags.entries import FlagEntry
from mindspeed_core.flags.help import placeholder
from mindspeed_core.flags.notes import FlagNote
from mindspeed_core.flags.unknown import bad_choice
from mindspeed_core.flags.values import (
    SHOWN,
    RefusedValue,
    arity,
    bad_value,
    least_values,
    most_values,
    truth_of,
    type_name,
    typed,
    way_out,
)
from mindspeed_core.resolver.plan import Problem

if TYPE_CHECKING:
    from mindspeed_core.registry import Registry


@dataclass
class Reading:
    """The values read so far.

    Attributes:
        registry: whose packages contribute values of flags.
        given: destination: value and source.
        problems: what is wrong with the command line.
        notes: flags that change nothing, or are read as others.
    """

    registry: Registry | None
    given: dict[str, tuple[Any, str]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[FlagNote] = field(default_factory=list)

    def take(self, entry: FlagEntry, option: str, values: list[str], inline: bool) -> None:
        """Record the values typed after an option, or what is wrong with them."""
        flag = entry.flag
        if flag.is_switch:
            if inline:
                self.problems.append(
                    bad_value(
                        option, values[0], "the flag is a switch and takes no value", way_out(flag, option)
                    )
                )
            else:
                self.given[flag.dest] = (not flag.inverts, f"flag {option}")
            return
        least, most = least_values(flag), most_values(flag)
        if len(values) < least or (most is not None and len(values) > most):
            wanted = arity(flag)
            shown = f"got {len(values)}" if values else "got none"
            remedy = f"write {option} {placeholder(flag)}; a value that begins with -- needs {option}=VALUE"
            self.problems.append(Problem("E-FLAG-VALUE", f"takes {wanted}, {shown}", remedy, flag=option))
            return
        self._convert(entry, option, values)

    def take_value(self, entry: FlagEntry, option: str, value: Any, as_switch: bool) -> None:
        """Record a Python value given for a flag, or what is wrong with it."""
        flag = entry.flag
        if flag.is_switch:
            truth = truth_of(value)
            if truth is None:
                self.problems.append(
                    bad_value(option, value, "the flag is a switch: True or False", "give one of them")
                )
            else:
                self.given[flag.dest] = (truth != (bool(flag.inverts) and as_switch), f"flag {option}")
            return
        if flag.nargs is None or flag.nargs == "?":
            values = [value]
        elif isinstance(value, str):
            try:
                values = shlex.split(value)
            except ValueError as error:
                self.problems.append(bad_value(option, value, str(error), "close the quote"))
                return
        elif isinstance(value, Iterable):
            values = list(value)
        else:
            values = [value]
        most = most_values(flag)
        if len(values) < least_values(flag) or (most is not None and len(values) > most):
            self.problems.append(bad_value(option, value, f"takes {arity(flag)}", "give as many"))
            return
        self._convert(entry, option, values)

    def _convert(self, entry: FlagEntry, option: str, values: Sequence[Any]) -> None:
        flag = entry.flag
        converted: list[Any] = []
        for value in values:
            try:
                result = typed(flag, value)
            except RefusedValue as error:
                self.problems.append(bad_value(option, value, str(error), way_out(flag, option)))
                return
            except Exception as error:
                known = flag.type in (int, float)
                detail = "" if known else f" ({describe(error)[:SHOWN]})"
                reason = f"not a {type_name(flag)}{detail}"
                self.problems.append(bad_value(option, value, reason, way_out(flag, option)))
                return
            if flag.choices and result not in flag.choices:
                self.problems.append(bad_choice(entry.flag, option, value, result, self.registry))
                return
            lost = self._lost(flag, option, result)
            if lost is not None:
                self.problems.append(lost)
                return
            converted.append(result)
        scalar = flag.nargs is None or flag.nargs == "?"
        final: Any = converted if not scalar else (converted[0] if converted else None)
        self.given[flag.dest] = (final, f"flag {option}")

    def _lost(self, flag: Flag, option: str, value: Any) -> Problem | None:
        """Return the problem of a value that a package contributes and that cannot be loaded."""
        registry = self.registry
        if registry is None or not flag.choices_from:
            return None
        if value not in registry.extension_names(flag.choices_from):
            return None
        if value in registry.extensions(flag.choices_from):
            return None
        record = next((b for b in registry.broken if b.entry_point == value), None)
        reason = str(record) if record is not None else f"{value!r} cannot be loaded"
        return Problem("E-BROKEN-PLUGIN", reason, record.remedy if record is not None else "", flag=option)
