"""The choice of backends by flag, environment variable and context manager.

This is the one state of the operator library that a process has. It is a piece of text, part of every key of
every operator's cache: changing it back and forth costs nothing, and a compiled graph notices the change.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from mindspeed_core.errors import UserError

VARIABLE = "MINDSPEED_OPS"
"""Environment variable with choices, ``OP=BACKEND[,OP=BACKEND]``; flag and context managers win over it."""
EVERY = "*"
"""Instead of an operator: all that have a backend of that name."""


class BackendError(UserError):
    """A backend that was asked for cannot serve; the message names operator, backend and reason."""


@dataclass
class _State:
    token: str = ""
    forced: Mapping[str, str] | None = None
    deterministic: bool = False
    checking: bool = False


STATE = _State()


def parse(text: str, source: str) -> dict[str, str]:
    """Read choices written as ``OP=BACKEND[,OP=BACKEND]``; messages name the flag or variable ``source``.

    Raises:
        BackendError: it is not written so.
    """
    chosen: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, backend = (part.strip() for part in item.partition("="))
        if not (name and equals and backend):
            raise BackendError(
                f"{source} {text!r}: {item!r} is not OP=BACKEND; write for instance rms_norm=reference, or "
                f"{EVERY}=reference for all operators"
            )
        if chosen.setdefault(name, backend) != backend:
            raise BackendError(
                f"{source} {text!r}: {name} is given two backends, {chosen[name]} and {backend}"
            )
    return chosen


def forced_backend(operator: str) -> tuple[str, str]:
    """Return the backend that was asked for, and by what; both empty when none was.

    Raises:
        BackendError: the environment variable cannot be read.
    """
    variable = parse(os.environ.get(VARIABLE, ""), f"environment variable {VARIABLE}")
    for chosen, source in ((STATE.forced or {}, "--ops-backend or ops.use"), (variable, VARIABLE)):
        for name in (operator, EVERY):
            if name in chosen:
                return chosen[name], f"{source}, {name}={chosen[name]}"
    return "", ""


def set_choices(
    forced: Mapping[str, str] | None = None,
    *,
    deterministic: bool | None = None,
    checking: bool | None = None,
) -> _State:
    """Change the process's choices and return what they were, for `restore`.

    Args:
        forced: backends by operator, added to those in force.
        deterministic: leave out backends that do not give the same bits twice.
        checking: check contracts on every call.
    """
    before = _State(**vars(STATE))
    if forced:
        STATE.forced = {**(STATE.forced or {}), **forced}
    if deterministic is not None:
        STATE.deterministic = deterministic
    if checking is not None:
        STATE.checking = checking
    _write_token()
    return before


def restore(before: _State) -> None:
    """Take back what `set_choices` changed."""
    vars(STATE).update(vars(before))


def _write_token() -> None:
    parts = [f"{name}={backend}" for name, backend in sorted((STATE.forced or {}).items())]
    parts += ["deterministic"] if STATE.deterministic else []
    parts += ["checking"] if STATE.checking else []
    STATE.token = ",".join(parts)


@contextmanager
def use(choices: str = "", *, deterministic: bool | None = None, **backends: str) -> Iterator[None]:
    """Force backends inside the context; inner contexts win, and both win over flag and environment.

    Args:
        choices: as on the command line, ``"rms_norm=reference"``; ``"*=reference"`` for all operators.
        deterministic: whether only backends that give the same bits twice may serve.
        backends: the same by keyword, ``use(rms_norm="reference")``.

    Raises:
        BackendError: ``choices`` is not written so. A backend that does not exist or cannot serve is an
            error of the call that it was forced for.
    """
    before = set_choices({**parse(choices, "ops.use"), **backends}, deterministic=deterministic)
    try:
        yield
    finally:
        restore(before)


@contextmanager
def checking() -> Iterator[None]:
    """Check contracts on every call instead of the first of each kind."""
    before = set_choices(checking=True)
    try:
        yield
    finally:
        restore(before)
