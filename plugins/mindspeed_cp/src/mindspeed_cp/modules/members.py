"""The groups of context parallelism: created once, in one order on all ranks, found by name."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import UserError
from mindspeed_cp.engine.attention import Members
from mindspeed_cp.engine.planners import RING
from mindspeed_cp.options import CPOptions, cp_options

if TYPE_CHECKING:
    from mindspeed_core.session import Session


INNER, OUTER, ACROSS, SECOND = "cp.inner", "cp.outer", "cp.across", "cp.second"


def group_parts(options: CPOptions) -> dict[str, list[list[int]]]:
    """Return how context-parallel groups are split: lists of places by name, in order of creation."""
    grid = options.grid
    parts: dict[str, list[list[int]]] = {}
    if grid.inner > 1 and grid.outer > 1:
        parts[INNER] = grid.inner_ranks()
        parts[OUTER] = grid.outer_ranks()
    if grid.window > 1:
        parts[ACROSS] = grid.outer_ranks()
    # With an odd number of ranks two neighbours would send on the same one.
    if options.send_receive_overlap and grid.method == RING and grid.outer > 1 and grid.outer % 2 == 0:
        parts[SECOND] = grid.outer_ranks()
    return parts


def create_groups(session: Session, args: Namespace, pg: Any) -> None:
    """Create the groups that the algorithm needs besides megatron-core's own.

    Raises:
        UserError: whoever made the groups of megatron-core made others than flags say.
    """
    if pg.cp.size() != args.context_parallel_size:
        raise UserError(
            f"--context-parallel-size {args.context_parallel_size}, but the context-parallel groups of "
            f"megatron-core have {pg.cp.size()} ranks; give initialize_model_parallel the same "
            "context_parallel_size"
        )
    for name, parts in group_parts(cp_options(args)).items():
        session.groups.split(name, pg.cp, parts)


def members_of(session: Session, options: CPOptions, whole: Any) -> Members:
    """Return this rank's groups."""
    grid, groups, parts = options.grid, session.groups, group_parts(options)
    both = grid.inner > 1 and grid.outer > 1
    return Members(
        rank=whole.rank(),
        inner=groups[INNER] if both else (whole if grid.inner > 1 else None),
        outer=groups[OUTER] if both else (whole if grid.outer > 1 else None),
        across=groups[ACROSS] if ACROSS in parts else None,
        second=groups[SECOND] if SECOND in parts else None,
    )
