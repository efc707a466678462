"""Notes on the routing of experts that a user should read before a run; no torch."""

from __future__ import annotations

from typing import Any


def notes(args: Any) -> list[str]:
    """Return which of the routing's decisions depend on the layout, one sentence each.

    Under sequence or context parallelism a rank routes its part of a sequence by itself: what is decided over
    all of its tokens at once comes out otherwise than where a rank has whole sequences.
    """
    parts = _parts(args)
    if getattr(args, "num_experts", None) is None or parts == 1:
        return []
    decided = []
    factor = getattr(args, "moe_expert_capacity_factor", None)
    if factor is not None:
        decided.append(f"--moe-expert-capacity-factor {factor:g} drops tokens")
    if routes_by_sinkhorn(args):
        decided.append("--moe-router-load-balancing-type sinkhorn chooses experts")
    return [
        f"{choice} in each of the {parts} parts of a sequence by itself, so that the run differs from one on "
        "whole sequences, as in Megatron-LM"
        for choice in decided
    ]


def routes_by_sinkhorn(args: Any) -> bool:
    """Return whether ``--moe-router-load-balancing-type``, a name or several, chooses experts by sinkhorn."""
    kinds = getattr(args, "moe_router_load_balancing_type", None) or ()
    return "sinkhorn" in ([kinds] if isinstance(kinds, str) else kinds)


def _parts(args: Any) -> int:
    """Return over how many ranks a sequence is split where it is routed."""
    tensor = (
        getattr(args, "tensor_model_parallel_size", 1) if getattr(args, "sequence_parallel", False) else 1
    )
    return int(tensor * (getattr(args, "context_parallel_size", 1) or 1))
