"""A flag together with the check of its value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mindspeed_core.feature import Flag

if TYPE_CHECKING:
    from argparse import Namespace


@dataclass(frozen=True)
class CheckedFlag(Flag):
    """A flag that may not go with every other argument.

    Attributes:
        check: yields what is wrong with the value beside the other arguments, one sentence each with the
            numbers and the way out.
        ignored: yields why the value has no effect beside the other arguments.
    """

    check: Callable[[Namespace], Iterable[str]] = lambda args: ()
    ignored: Callable[[Namespace], Iterable[str]] = lambda args: ()


def problems(flags: Sequence[Flag], args: Namespace) -> list[str]:
    """Return everything that the checks of flags find, in their order."""
    checks = [flag.check for flag in flags if isinstance(flag, CheckedFlag)]
    return [problem for check in checks for problem in check(args)]


def ignored(flags: Sequence[Flag], args: Namespace) -> dict[str, str]:
    """Return why flags have no effect, for each that has none."""
    checked = [flag for flag in flags if isinstance(flag, CheckedFlag)]
    return {flag.name: reason for flag in checked for reason in flag.ignored(args)}
