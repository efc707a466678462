"""The groups of context parallelism: created once, in one order on all ranks, found by name."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import UserError
from mindspeed_cp.arrangement import ACROSS, INNER, OUTER, SECOND, grid_of, group_parts
from mindspeed_cp.engine.attention import Members
from mindspeed_cp.options import cp_options

if TYPE_CHECKING:
    from mindspeed_core.session import Session


def create_groups(session: Session, args: Namespace, pg: Any) -> None:
    """Create the groups that the algorithm needs besides megatron-core's own.

    Args:
        session: keeps them by name.
        args: the validated arguments.
        pg: the result of `build_process_groups`.

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


def members_of(session: Session, args: Namespace, whole: Any) -> Members:
    """This rank's groups.

    Args:
        session: where `create_groups` left them.
        args: the validated arguments.
        whole: megatron-core's context-parallel group.
    """
    options, groups = cp_options(args), session.groups
    grid, parts = grid_of(options), group_parts(options)
    both = grid.inner > 1 and grid.outer > 1
    return Members(
        rank=whole.rank(),
        inner=groups[INNER] if both else (whole if grid.inner > 1 else None),
        outer=groups[OUTER] if both else (whole if grid.outer > 1 else None),
        across=groups[ACROSS] if ACROSS in parts else None,
        second=groups[SECOND] if SECOND in parts else None,
    )
