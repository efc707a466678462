"""Functions that other packages contribute to searches: how one is checked, and how one is chosen."""

from __future__ import annotations

from typing import Any

from mindspeed_core.errors import UserError
from mindspeed_core.feature import DeclarationError


def check_callable(contributed: Any) -> None:
    """Refuse what cannot be called.

    Raises:
        DeclarationError: it is no function.
    """
    if not callable(contributed):
        raise DeclarationError(
            f"{contributed!r} is no function; a strategy takes the search and returns candidates, a "
            "cost takes an estimate, the arguments and the hardware and returns an estimate"
        )


def contributed(registry: Any, strategy: str | None, cost: str | None) -> tuple[Any, Any]:
    """Return the strategy and the cost of these names; None for each that has none.

    Raises:
        UserError: one is not installed, or broken.
    """
    chosen: list[Any] = []
    for point, name, flag in (
        ("tune.strategies", strategy, "--tune-strategy"),
        ("tune.costs", cost, "--tune-cost"),
    ):
        if not name:
            chosen.append(None)
            continue
        there = registry.extensions(point)
        if name not in there:
            broken = next((str(one) for one in registry.broken if one.entry_point == name), "")
            known = ", ".join(there) or "no package contributes one"
            raise UserError(f"{flag} {name}: {broken or f'is not installed; there are: {known}'}")
        chosen.append(there[name])
    return chosen[0], chosen[1]
