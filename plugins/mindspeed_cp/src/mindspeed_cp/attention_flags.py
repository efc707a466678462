"""The effect of other packages' attention flags on attention over a split sequence; no torch.

A launch script names its kernel (``--use-flash-attn``) and what queries see in the kernel's own words
(``--sparse-mode 4 --pre-tockens 4096``). Split over ranks, the model is to stay the same one: its band, its
biases by distance. Whoever declares these flags need not be installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mindspeed_cp.algorithms import ADAPTIVE

if TYPE_CHECKING:
    from argparse import Namespace


_PACKED = (7, 8)
_PREFIX = (5, 6)


def fused(values: Mapping[str, Any]) -> bool:
    """Return whether fused attention is asked for, by its own flag or by one that needs it."""
    return bool(values.get("use_flash_attn") or values.get("use_fusion_attn_v2") or alibi(values))


def alibi(values: Mapping[str, Any]) -> bool:
    """Return whether attention has biases by distance."""
    return values.get("position_embedding_type") == "alibi"


def band(values: Mapping[str, Any], length: int) -> int | None:
    """Return how many keys before its own a query sees, where fused attention was asked for a band."""
    if not fused(values):
        return None
    mode, before = values.get("sparse_mode") or 0, values.get("pre_tockens")
    if before is None or mode not in (0, 4) or before >= length - 1:
        return None
    return int(before)


def problems(args: Namespace) -> list[str]:
    """Return what flags ask for that is not computed over a split sequence, one sentence each."""
    values = vars(args)
    found = [_mask_problem(values) if fused(values) else "", *_alibi_problems(values)]
    if values.get("qk_clip"):
        found.append(
            "--qk-clip needs the largest score of every head, which is not kept here; leave it out, or keep "
            "sequences whole with --context-parallel-size 1"
        )
    variant = values.get("experimental_attention_variant")
    if variant:
        found.append(
            f"--experimental-attention-variant {variant} is no attention that ranks can share; leave it out, "
            "or keep sequences whole with --context-parallel-size 1"
        )
    if values.get("hybrid_override_pattern") or values.get("is_hybrid_model"):
        found.append(
            "layers with a state along the sequence (--hybrid-override-pattern, --is-hybrid-model) cannot be "
            "split over ranks; keep sequences whole with --context-parallel-size 1"
        )
    return [problem for problem in found if problem]


def _mask_problem(values: Mapping[str, Any]) -> str:
    mode = values.get("sparse_mode") or 0
    before, behind = values.get("pre_tockens") or 0, values.get("next_tockens") or 0
    if mode in _PREFIX:
        return f"--sparse-mode {mode} needs the prefix of every sample, which nobody provides; use 2"
    if mode in _PACKED:
        return (
            f"--sparse-mode {mode} is for one packed sequence; a split sequence keeps documents apart with "
            "--reset-attention-mask --reset-position-ids"
        )
    if mode == 4 and values.get("window_size") is not None:
        return "--sparse-mode 4 and --window-size both say what queries see; drop one of them"
    if mode == 4 and behind > 0:
        return f"--next-tockens {behind} lets a causal query see tokens behind its own; use 0"
    if mode in (0, 4) and behind < 0:
        return (
            f"--next-tockens {behind} hides the nearest tokens, which is not computed over a split sequence; "
            "use 0"
        )
    if mode in (0, 4) and before < 0:
        return f"--pre-tockens {before} leaves a query nothing to see; use at least 0"
    return ""


def _alibi_problems(values: Mapping[str, Any]) -> Iterator[str]:
    if not alibi(values):
        return
    algorithm = values.get("context_parallel_algo")
    if algorithm in ADAPTIVE:
        yield (
            f"--position-embedding-type alibi does not go with --context-parallel-algo {algorithm}; use "
            "megatron_cp_algo, ulysses_cp_algo, hybrid_cp_algo or kvallgather_cp_algo"
        )


def kept_policy(args: Namespace) -> str | None:
    """Return what is kept between forward and backward: nothing where attention is computed again anyway."""
    granularity = getattr(args, "recompute_granularity", None)
    modules = getattr(args, "recompute_modules", None) or ["core_attn"]
    again = granularity == "full" or (granularity == "selective" and "core_attn" in modules)
    policy: str | None = args.context_parallel_kv_cache_policy
    return None if again else policy
