"""The process groups of a plan of communication, one for each hop."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from mindspeed_core.errors import UserError
from mindspeed_core.runtime.gather import all_gather_values
from mindspeed_moe.comm_plans import NODE_SIZE
from mindspeed_moe.planned_dispatcher import Plan

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

    from mindspeed_core.session import Session
    from mindspeed_moe.comm_plans import Hops


def hop_parts(hops: Hops, number: int) -> list[list[int]]:
    """Return the positions in a group of experts that exchange rows in one hop."""
    ranks = prod(hop.ranks for hop in hops)
    before = prod(hop.ranks for hop in hops[:number])
    size = hops[number].ranks
    stride = ranks // before
    step = stride // size
    return [
        [prefix * stride + digit * step + rest for digit in range(size)]
        for prefix in range(before)
        for rest in range(step)
    ]


def create_groups(session: Session, hops: Hops, pg: ProcessGroupCollection) -> None:
    """Create the groups of all hops; every rank calls it.

    Raises:
        UserError: whoever made the groups of megatron-core made others than flags say, or ranks follow
            different plans.
    """
    if len({tuple(everyones) for everyones in all_gather_values(hops)}) > 1:
        raise UserError(
            f"ranks follow different plans, since their launchers started different numbers of processes per "
            f"node; add {NODE_SIZE}"
        )
    ranks = prod(hop.ranks for hop in hops)
    if hops and pg.ep.size() != ranks:
        raise UserError(
            f"--expert-model-parallel-size {ranks}, but the groups of experts of megatron-core have "
            f"{pg.ep.size()} ranks; give initialize_model_parallel the same expert_model_parallel_size"
        )
    if len(hops) > 1:
        for number in range(len(hops)):
            session.groups.split(_name(number), pg.ep, hop_parts(hops, number))


def plan_on_this_rank(session: Session, hops: Hops, pg: ProcessGroupCollection) -> Plan:
    """Return the plan with this rank's groups."""
    groups = [session.groups[_name(number)] for number in range(len(hops))] if len(hops) > 1 else [pg.ep]
    return Plan(hops, groups, pg.ep)


def _name(number: int) -> str:
    return f"moe.hop.{number + 1}"
