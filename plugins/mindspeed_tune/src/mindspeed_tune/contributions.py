"""Checks of functions that other packages contribute to searches."""

from __future__ import annotations

from typing import Any

from mindspeed_core.feature import DeclarationError


def check_callable(contributed: Any) -> None:
    """Refuse what cannot be called.

    Raises:
        DeclarationError: it is no function.
    """
    if not callable(contributed):
        raise DeclarationError(
            f"{contributed!r} is no function; a strategy takes the search and returns candidates, a "
            "cost takes an "
            "estimate, the arguments and the hardware and returns an estimate"
        )
