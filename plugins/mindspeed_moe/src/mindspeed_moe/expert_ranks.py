"""Ranks that experts are spread over, as flags say it, before and after they are translated; no torch."""

from __future__ import annotations

from typing import Any


def expert_ranks(args: Any) -> int:
    """Return the ranks that hold different whole experts, or parts of them."""
    ranks: int = getattr(args, "expert_model_parallel_size", None) or 1
    return ranks * tensor_ranks(args) if extends(args) else ranks


def expert_cuts(args: Any) -> int:
    """Return the ranks that an expert is cut over."""
    if extends(args):
        return 1
    cuts: int | None = getattr(args, "expert_tensor_parallel_size", None)
    return cuts or tensor_ranks(args)


def tensor_ranks(args: Any) -> int:
    """Return the ranks of tensor parallelism."""
    ranks: int = getattr(args, "tensor_model_parallel_size", None) or 1
    return ranks


def extends(args: Any) -> bool:
    """Return whether the ranks of tensor parallelism hold experts of their own, not yet translated."""
    return bool(getattr(args, "moe_tp_extend_ep", False))
