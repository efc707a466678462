"""The groups of context parallelism: created once, in one order on all ranks, found by name."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from mindspeed_cp.engine.attention import Members
from mindspeed_cp.engine.planners import GATHER, RING, Grid
from mindspeed_cp.options import ADAPTIVE_ALGO, GATHER_ALGO, HYBRID_ADAPTIVE_ALGO, CPOptions, cp_options

if TYPE_CHECKING:
    from mindspeed_core.session import Session

WHOLE, INNER, OUTER, ACROSS = "cp.whole", "cp.inner", "cp.outer", "cp.across"


def grid_of(options: CPOptions) -> Grid:
    """How the ranks are arranged."""
    gathers = options.algorithm in (GATHER_ALGO, ADAPTIVE_ALGO, HYBRID_ADAPTIVE_ALGO)
    layout = options.layout
    if layout == "auto" and options.algorithm in (ADAPTIVE_ALGO, HYBRID_ADAPTIVE_ALGO):
        layout = "balanced"
    if layout == "auto" and not options.causal:
        layout = "contiguous"
    return Grid(
        options.outer,
        options.inner,
        GATHER if gathers else RING,
        options.window,
        layout,
        options.chunks,
    )


def create_groups(session: Session, args: Namespace, pg: Any) -> None:
    """Create the groups that the algorithm needs besides megatron-core's own.

    Args:
        session: keeps them by name.
        args: the validated arguments.
        pg: the result of `build_process_groups`.
    """
    grid = grid_of(cp_options(args))
    if grid.inner > 1 and grid.outer > 1:
        session.groups.split(INNER, pg.cp, grid.inner_ranks())
        session.groups.split(OUTER, pg.cp, grid.outer_ranks())
    if grid.window > 1:
        session.groups.split(ACROSS, pg.cp, grid.outer_ranks())


def members_of(session: Session, args: Namespace, whole: Any) -> Members:
    """This rank's groups.

    Args:
        session: where `create_groups` left them.
        args: the validated arguments.
        whole: megatron-core's context-parallel group.
    """
    grid, groups = grid_of(cp_options(args)), session.groups
    both = grid.inner > 1 and grid.outer > 1
    return Members(
        rank=whole.rank(),
        inner=groups[INNER] if both else (whole if grid.inner > 1 else None),
        outer=groups[OUTER] if both else (whole if grid.outer > 1 else None),
        across=groups[ACROSS] if grid.window > 1 else None,
    )
