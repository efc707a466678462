"""The markers of stages and of their implementations, and the `DONE` sentinel.

Apart from the stages themselves, and without importing pluggy: declarations of every plugin use them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, TypeVar, overload

from mindspeed_core.hooks.versions import API_VERSION

__all__ = ["API_VERSION", "DONE", "PROJECT", "Done", "hookimpl", "hookspec"]

F = TypeVar("F", bound=Callable[..., Any])

PROJECT = "mindspeed"
"""pluggy's project name: hook implementations carry the attribute ``mindspeed_impl``."""


class Done(Enum):
    """Type of `DONE`."""

    DONE = "done"


DONE = Done.DONE
"""Result of a stage that has nothing to return."""


def hookspec(
    function: Callable[..., Any] | None = None,
    *,
    firstresult: bool = True,
    since: str = "1.0",
    added: Mapping[str, str] | None = None,
) -> Any:
    """Mark a function as a stage; with or without parentheses.

    Args:
        function: the stage, when used without parentheses.
        firstresult: the first implementation that returns something ends the stage. ``False`` collects the
            results of every implementation.
        since: the interface version that introduced the stage.
        added: arguments that came later than the stage, with the interface version of each.
    """

    def mark(target: Callable[..., Any]) -> Callable[..., Any]:
        setattr(
            target,
            PROJECT + "_spec",
            {"firstresult": firstresult, "historic": False, "warn_on_impl": None, "warn_on_impl_args": None},
        )
        target.__mindspeed_since__ = since  # type: ignore[attr-defined]
        target.__mindspeed_added__ = dict(added or {})  # type: ignore[attr-defined]
        return target

    return mark if function is None else mark(function)


@overload
def hookimpl(function: F) -> F: ...
@overload
def hookimpl(*, wrapper: bool = ..., trylast: bool = ..., tryfirst: bool = ...) -> Callable[[F], F]: ...
def hookimpl(
    function: F | None = None, *, wrapper: bool = False, trylast: bool = False, tryfirst: bool = False
) -> F | Callable[[F], F]:
    """Mark a method as the implementation of the stage that has its name.

    The same marker that ``pluggy.HookimplMarker("mindspeed")`` sets, without importing pluggy.

    Args:
        function: the method, when used without parentheses.
        wrapper: the method is a generator that wraps the stage: code before, ``result = yield``, code
            after, ``return`` the (changed) result.
        trylast: called after every other implementation; hosts mark their defaults so.
        tryfirst: called before every other implementation.
    """

    def mark(target: F) -> F:
        setattr(
            target,
            PROJECT + "_impl",
            {
                "wrapper": wrapper,
                "hookwrapper": False,
                "optionalhook": False,
                "tryfirst": tryfirst,
                "trylast": trylast,
                "specname": None,
            },
        )
        return target

    return mark if function is None else mark(function)
