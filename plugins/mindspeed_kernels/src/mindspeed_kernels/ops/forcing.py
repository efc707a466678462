"""Choices of backends that last as long as a session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import ArgumentError
from mindspeed_kernels.ops.choice import EVERY, BackendError, parse, restore, set_choices
from mindspeed_kernels.ops.operator import OPERATORS, load_backends

if TYPE_CHECKING:
    from mindspeed_core.session import Session

FLAG = "--ops-backend"


def checked_choices(text: str) -> dict[str, str]:
    """Return the backends that a flag's text asks for, by operator.

    Raises:
        ArgumentError: ``text`` is not ``OP=BACKEND[,OP=BACKEND]``, or names an operator or a backend that
            does not exist.
    """
    try:
        forced = parse(text, FLAG)
    except BackendError as error:
        raise ArgumentError(
            FLAG, text, str(error), "write OP=BACKEND, for instance rms_norm=reference"
        ) from error
    load_backends()
    for name, backend in forced.items():
        operators = list(OPERATORS) if name == EVERY else [name]
        if name != EVERY and name not in OPERATORS:
            raise ArgumentError(
                FLAG, text, f"there is no operator {name!r}", f"there are {', '.join(sorted(OPERATORS))}"
            )
        known = sorted({other for operator in operators for other in OPERATORS[operator].backends})
        if backend not in known:
            raise ArgumentError(
                FLAG, text, f"{name} has no backend {backend!r}", f"there are {', '.join(known)}"
            )
    return forced


def force_until_close(session: Session, text: str, *, owner: str) -> None:
    """Force backends until the session closes, for a feature that owns the choice.

    Raises:
        ArgumentError: the text cannot be followed; see `checked_choices`.
    """
    forced = checked_choices(text)
    before: list[Any] = []
    session.ledger.setting(
        "mindspeed_kernels.ops:choice",
        lambda: before.append(set_choices(forced)),
        lambda: restore(before.pop()),
        owner=owner,
        reason=f"{FLAG} {text}",
    )
