"""Actions of other packages: functions that a schedule calls by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mindspeed_core.discovery.extensions import installed_extensions
from mindspeed_core.errors import UserError
from mindspeed_core.feature import DeclarationError
from mindspeed_pp.actions import NAMED
from mindspeed_pp.extension_points import ACTIONS
from mindspeed_pp.schedule import Schedule


@dataclass(frozen=True)
class NamedAction:
    """Place at which a named action runs.

    Attributes:
        run: the run in progress.
        schedule: of the batch.
        stage: pipeline stage of the action.
        microbatch: of the action.
        model: the chunk of that stage, as the schedule calls it.
    """

    run: Any
    schedule: Schedule
    stage: int
    microbatch: int
    model: Any


def names_of(schedule: Schedule) -> Iterator[str]:
    """Yield the names that a schedule calls, each once."""
    found = {a.op for order in schedule.orders for action in order for a in action.flat()}
    yield from sorted(op.removeprefix(NAMED) for op in found if op.startswith(NAMED))


def functions_of(schedule: Schedule) -> dict[str, Callable[[NamedAction], object]]:
    """Return the functions that a schedule calls, by the operation of the action.

    Raises:
        UserError: a name is that of no installed function.
    """
    names = list(names_of(schedule))
    if not names:
        return {}
    installed = installed_extensions(ACTIONS)
    known = installed.sound()
    for name in names:
        if name not in known:
            has = ", ".join(sorted(known)) or "none"
            raise UserError(
                f"schedule {schedule.name}: no installed package has the action {name!r} (there are: {has}); "
                f"register a function under the entry-point group {ACTIONS.group}"
            )
    return {NAMED + name: installed.get(name) for name in names}


def check_function(contributed: Any) -> None:
    """Refuse what cannot be called.

    Raises:
        DeclarationError: says what it is.
    """
    if not callable(contributed):
        raise DeclarationError(f"an action is a function of one NamedAction, not {contributed!r}")
