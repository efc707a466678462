"""Further values of ``--context-parallel-algo``: planners that other packages contribute; no torch.

A planner is a function from the number of ranks and the arguments to a `mindspeed_cp.engine.planners.Grid`.
Only the one that is named is imported.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from mindspeed_core.discovery.entry_points import describe, sources
from mindspeed_core.errors import ArgumentError
from mindspeed_core.feature import DeclarationError

if TYPE_CHECKING:
    from mindspeed_cp.engine.planners import Grid

POINT, GROUP = "cp.planners", "mindspeed_cp.planners"
FLAG = "--context-parallel-algo"
Planner = Callable[[int, Namespace], "Grid"]


def check_planner(contributed: Any) -> None:
    """Refuse what is no function."""
    if not callable(contributed):
        raise DeclarationError(
            f"a planner is a function from ranks and arguments to a Grid, not {contributed!r}"
        )


@lru_cache(maxsize=8)
def planner_named(name: str) -> Planner:
    """The planner of an installed package.

    Raises:
        ArgumentError: no package has it, several do, or it cannot be loaded.
    """
    found = [source for source in sources(GROUP) if source.name == name]
    if len(found) != 1:
        who = " and ".join(source.dist for source in found)
        reason = f"{who} both contribute it" if found else "no installed package contributes it"
        raise ArgumentError(FLAG, name, reason, "uninstall one of them" if found else "see --help")
    try:
        planner: Planner = found[0].load()
        check_planner(planner)
    except Exception as error:
        raise ArgumentError(
            FLAG, name, f"{found[0].dist} cannot be loaded: {describe(error)}", "mend it"
        ) from error
    return planner


def planned(name: str, size: int, args: Namespace) -> Grid:
    """The arrangement of ranks by a planner of another package.

    Raises:
        ArgumentError: there is no such planner, or it refuses the sizes.
    """
    from mindspeed_cp.engine.planners import Grid

    planner = planner_named(name)
    try:
        grid = planner(size, args)
    except ValueError as error:
        raise ArgumentError(FLAG, name, str(error), "choose another algorithm, or other sizes") from error
    if not isinstance(grid, Grid) or grid.ranks != size:
        raise ArgumentError(
            FLAG, name, f"arranges {size} ranks as {grid!r}", "a planner answers a Grid of all ranks"
        )
    return grid
