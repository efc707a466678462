"""Tensors that context parallelism keeps between forward and backward, by the flags; no torch."""

from __future__ import annotations

from argparse import Namespace


def kept_policy(args: Namespace) -> str | None:
    """Return what is kept between forward and backward: nothing where attention is computed again anyway."""
    granularity = getattr(args, "recompute_granularity", None)
    modules = getattr(args, "recompute_modules", None) or ["core_attn"]
    again = granularity == "full" or (granularity == "selective" and "core_attn" in modules)
    policy: str | None = args.context_parallel_kv_cache_policy
    return None if again else policy
