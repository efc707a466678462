"""The hookspec marker, the `DONE` sentinel and the version of the hook interface.

Apart from the stages themselves, so that declarations can name stages without importing pluggy.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar, overload

from mindspeed_core.feature import PROJECT

F = TypeVar("F", bound=Callable[..., Any])

API_VERSION = "1.0"
"""Raised in its minor part when a stage or an argument is added, in its major part when one goes."""


class Done(Enum):
    """Type of `DONE`."""

    DONE = "done"


DONE = Done.DONE
"""Result of a stage that has nothing to return."""


@overload
def hookspec(function: F) -> F: ...
@overload
def hookspec(*, firstresult: bool = ..., since: str = ...) -> Callable[[F], F]: ...
def hookspec(
    function: F | None = None, *, firstresult: bool = True, since: str = "1.0"
) -> F | Callable[[F], F]:
    """Mark a function as a stage.

    Args:
        function: the stage, when used without parentheses.
        firstresult: the first implementation that returns something ends the stage. ``False`` collects the
            results of every implementation.
        since: the interface version that introduced the stage.
    """

    def mark(target: F) -> F:
        setattr(
            target,
            PROJECT + "_spec",
            {"firstresult": firstresult, "historic": False, "warn_on_impl": None, "warn_on_impl_args": None},
        )
        target.__mindspeed_since__ = since  # type: ignore[attr-defined]
        return target

    return mark if function is None else mark(function)
