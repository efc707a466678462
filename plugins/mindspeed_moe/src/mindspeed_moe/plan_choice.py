"""The plan of communication that flags ask for, and the bytes it is expected to send; no torch."""

from __future__ import annotations

import os
from typing import Any

from mindspeed_moe.comm_plans import AUTO, DEDUP, FLAT, Exchanged, Hops, cheapest, hops_of
from mindspeed_moe.expert_ranks import expert_ranks, tensor_ranks


def asked_plan(args: Any) -> str:
    """Return the plan that flags name, `AUTO` included."""
    if getattr(args, "moe_zerc", False):
        return DEDUP
    if getattr(args, "moe_hierarchical_alltoallv", False):
        return AUTO
    name: str | None = getattr(args, "moe_comm_plan", None)
    return name or FLAT


def node_size(args: Any) -> int:
    """Return how many ranks of experts are on one node.

    Without a flag the launcher's processes per node, one for each device; all where no launcher says.
    """
    if getattr(args, "moe_zerc", False):
        return 1
    given: int | None = getattr(args, "moe_node_size", None)
    if given is not None:
        return given
    ranks = expert_ranks(args)
    processes = os.environ.get("LOCAL_WORLD_SIZE", "")
    return min(ranks, int(processes)) if processes.isdecimal() and int(processes) else ranks


def chosen_plan(args: Any) -> str:
    """Return the plan that is followed, chosen by its expected bytes where `AUTO` is asked for."""
    name = asked_plan(args)
    return cheapest(exchanged(args), expert_ranks(args), node_size(args)) if name == AUTO else name


def chosen_hops(args: Any) -> Hops:
    """Return the hops of the plan that is followed.

    Raises:
        ArgumentError: a package contributes it that cannot be loaded, or it does not reach all ranks.
    """
    return hops_of(chosen_plan(args), expert_ranks(args), node_size(args))


def exchanged(args: Any) -> Exchanged:
    """Return the sizes of what a rank's tokens send in one layer and direction of a micro-batch."""
    cut = (getattr(args, "context_parallel_size", None) or 1) * tensor_ranks(args)
    halves = getattr(args, "bf16", False) or getattr(args, "fp16", False)
    element = 2 if halves else 4
    groups = getattr(args, "moe_router_num_groups", None) or 0
    nodes = max(1, expert_ranks(args) // node_size(args))
    reached = getattr(args, "moe_router_group_topk", None) or 0
    whole = halves and getattr(args, "moe_router_dtype", None) is None
    return Exchanged(
        tokens=(getattr(args, "seq_length", None) or 0)
        * (getattr(args, "micro_batch_size", None) or 1)
        // cut,
        choices=getattr(args, "moe_router_topk", None) or 1,
        experts=getattr(args, "num_experts", None) or 1,
        row_bytes=(getattr(args, "hidden_size", None) or 0) * element,
        prob_bytes=element if whole else 8 if getattr(args, "moe_router_dtype", None) == "fp64" else 4,
        # A group of experts that lies on one node is one node.
        reached=reached if groups and groups % nodes == 0 else 0,
    )
