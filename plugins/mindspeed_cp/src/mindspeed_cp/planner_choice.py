"""Further values of ``--context-parallel-algo``: planners that other packages contribute; no torch.

A planner is a function from the number of ranks and the arguments to a `mindspeed_cp.engine.planners.Grid`.
Only the one that is named is imported.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from mindspeed_core.discovery.extensions import ExtensionError, installed_extensions
from mindspeed_core.errors import ArgumentError
from mindspeed_core.feature import DeclarationError
from mindspeed_cp.engine.planners import Grid
from mindspeed_cp.extension_points import PLANNERS

FLAG = "--context-parallel-algo"


def check_planner(contributed: Any) -> None:
    """Refuse what is no function.

    Raises:
        DeclarationError: says what it is.
    """
    if not callable(contributed):
        raise DeclarationError(
            f"a planner is a function from ranks and arguments to a Grid, not {contributed!r}"
        )


def planned(name: str, size: int, args: Namespace) -> Grid:
    """Return the arrangement of ranks by a planner of another package.

    Raises:
        ArgumentError: there is no such planner, or it refuses the sizes.
    """
    try:
        grid = installed_extensions(PLANNERS).get(name)(size, args)
    except ExtensionError as error:
        raise ArgumentError(FLAG, name, str(error), "see --help") from error
    except ValueError as error:
        raise ArgumentError(FLAG, name, str(error), "choose another algorithm, or other sizes") from error
    if not isinstance(grid, Grid) or grid.ranks != size:
        raise ArgumentError(
            FLAG, name, f"arranges {size} ranks as {grid!r}", "a planner answers a Grid of all ranks"
        )
    return grid
