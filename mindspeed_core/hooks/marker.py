"""The hookspec marker and the `DONE` sentinel.

Apart from the stages themselves, so that declarations can name stages without importing pluggy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from mindspeed_core.feature import PROJECT
from mindspeed_core.hooks.versions import API_VERSION

__all__ = ["API_VERSION", "DONE", "Done", "hookspec"]


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
