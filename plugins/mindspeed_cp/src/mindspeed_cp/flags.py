"""The flags of context parallelism with the names that launch scripts use, each with its check; no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

from mindspeed_core.errors import ArgumentError
from mindspeed_core.feature import Flag, dest_of
from mindspeed_cp.algorithms import (
    ALGORITHMS,
    HYBRID_ALGO,
    RING_ALGO,
    ULYSSES_ALGO,
    WITH_HEADS,
    WITH_RING,
    known_algorithm,
)
from mindspeed_cp.attention_flags import kept_policy
from mindspeed_cp.checked_flag import CheckedFlag
from mindspeed_cp.mask_flags import DOCUMENT_FLAGS, LAYOUT_FLAGS, MASK_FLAGS

if TYPE_CHECKING:
    from argparse import Namespace


def _heads(args: Namespace) -> int:
    """Return the query heads of a tensor-parallel rank; many where the model is not configured yet."""
    heads: int = (args.num_attention_heads or sys.maxsize) // args.tensor_model_parallel_size
    return heads


def _size(args: Namespace) -> Iterator[str]:
    size, length = args.context_parallel_size, getattr(args, "seq_length", None)
    if length and length < 2 * size:
        yield (
            f"--seq-length ({length}) is too short for --context-parallel-size ({size}); a rank holds at "
            "least 2 tokens"
        )


def _algorithm(args: Namespace) -> Iterator[str]:
    size, algorithm, heads = args.context_parallel_size, args.context_parallel_algo, _heads(args)
    if algorithm == ULYSSES_ALGO and heads < size:
        yield (
            f"ulysses_cp_algo needs at least one query head per rank: num_attention_heads / "
            f"tensor_model_parallel_size ({heads}) < context_parallel_size ({size}); use hybrid_cp_algo or "
            "megatron_cp_algo"
        )
    if algorithm in ALGORITHMS or size == 1:
        return
    from mindspeed_cp.planner_choice import planned

    try:
        inner = planned(algorithm, size, args).inner
    except ArgumentError as error:
        yield str(error)
        return
    if inner > heads:
        yield (
            f"--context-parallel-algo {algorithm} exchanges heads among {inner} ranks, num_attention_heads / "
            f"tensor_model_parallel_size is {heads}"
        )


def _degree(args: Namespace) -> Iterator[str]:
    size, algorithm, heads = args.context_parallel_size, args.context_parallel_algo, _heads(args)
    degree = args.ulysses_degree_in_cp
    if algorithm not in WITH_HEADS:
        return
    if degree is None:
        yield f"--ulysses-degree-in-cp must be specified in {algorithm}"
    elif degree < 1 or size % degree or size == degree:
        yield (
            f"--context-parallel-size ({size}) must be a multiple of --ulysses-degree-in-cp ({degree}) and "
            "larger than it"
        )
    elif heads < degree:
        yield (
            f"--ulysses-degree-in-cp ({degree}) needs as many query heads per rank, num_attention_heads / "
            f"tensor_model_parallel_size is {heads}"
        )


def _unused_degree(args: Namespace) -> Iterator[str]:
    algorithm, degree = args.context_parallel_algo, args.ulysses_degree_in_cp
    if degree is not None and algorithm not in WITH_HEADS:
        yield f"{algorithm} has one kind of ranks; hybrid_cp_algo and hybrid_adaptive_cp_algo read it"


def _window(args: Namespace) -> Iterator[str]:
    window, degree, algorithm = args.cp_window_size, args.ulysses_degree_in_cp, args.context_parallel_algo
    ring = args.context_parallel_size
    if algorithm == HYBRID_ALGO and degree and ring % degree == 0:
        ring //= degree
    if window == 1:
        return
    if algorithm not in WITH_RING:
        yield f"--cp-window-size {window} needs megatron_cp_algo or hybrid_cp_algo, got {algorithm}"
    elif not 1 <= window < ring:
        yield f"--cp-window-size must be at least 1 and below the ranks of the ring ({ring}), got {window}"
    elif ring % window:
        yield f"the ranks of the ring ({ring}) must be a multiple of --cp-window-size ({window})"


def _cache_policy(args: Namespace) -> Iterator[str]:
    policy, algorithm = args.context_parallel_kv_cache_policy, args.context_parallel_algo
    if not policy:
        return
    if args.context_parallel_size == 1:
        yield "context parallel size must be larger than 1 when --context-parallel-kv-cache-policy is set"
    if algorithm not in (*WITH_RING, ULYSSES_ALGO):
        yield (
            f"--context-parallel-kv-cache-policy {policy} keeps what a ring receives, or what heads were "
            f"exchanged from, and {algorithm} fetches keys again; use megatron_cp_algo, hybrid_cp_algo or "
            "ulysses_cp_algo"
        )


def _idle_cache_policy(args: Namespace) -> Iterator[str]:
    policy = args.context_parallel_kv_cache_policy
    if policy and kept_policy(args) is None:
        yield (
            f"--recompute-granularity {args.recompute_granularity} computes attention again, and keeps "
            "nothing of it"
        )


def _cache_interval(args: Namespace) -> Iterator[str]:
    interval = args.context_parallel_cache_interval
    if interval and not args.context_parallel_kv_cache_policy:
        yield f"--context-parallel-cache-interval {interval} needs --context-parallel-kv-cache-policy"
    if interval < 0:
        yield f"--context-parallel-cache-interval must not be negative, got {interval}"
    if interval >= (args.num_layers or interval + 1):
        yield (
            f"--context-parallel-cache-interval ({interval}) should be smaller than the number of layers "
            f"({args.num_layers})"
        )


def _without_ring(name: str) -> Callable[[Namespace], Iterator[str]]:
    """Say that a switch of rings has no effect where there is none."""

    def ignored(args: Namespace) -> Iterator[str]:
        algorithm = args.context_parallel_algo
        if getattr(args, dest_of(name)) and algorithm not in WITH_RING:
            yield f"{algorithm} has no ring; megatron_cp_algo and hybrid_cp_algo read it"

    return ignored


def _head_groups(args: Namespace) -> Iterator[str]:
    groups, algorithm = args.cp_fetch_head_groups, args.context_parallel_algo
    if groups < 1:
        yield f"--cp-fetch-head-groups must be at least 1, got {groups}"
    elif groups > 1 and algorithm in (*WITH_RING, ULYSSES_ALGO):
        yield (
            f"--cp-fetch-head-groups {groups} fetches keys in groups, and {algorithm} does not fetch; use "
            "kvallgather_cp_algo or an adaptive algorithm, or leave it out"
        )


def _gathered_keys(args: Namespace) -> Iterator[str]:
    if not args.use_ulysses_allgather_kv:
        return
    if args.context_parallel_size == 1:
        yield "--use-ulysses-allgather-kv needs --context-parallel-size larger than 1, got 1"
    if args.context_parallel_algo != ULYSSES_ALGO:
        yield f"--use-ulysses-allgather-kv needs ulysses_cp_algo, got {args.context_parallel_algo}"
    if not args.group_query_attention:
        yield "--use-ulysses-allgather-kv needs --group-query-attention"


def _fused_update(args: Namespace) -> Iterator[str]:
    if not args.use_fused_ring_attention_update or args.context_parallel_algo not in WITH_RING:
        return
    if find_spec("mindspeed_kernels") is None:
        yield (
            "--use-fused-ring-attention-update is an operator of mindspeed-kernels, which is not installed: "
            "pip install 'mindspeed-cp[kernels]', or leave it out"
        )


FLAGS = (
    CheckedFlag(
        "--context-parallel-size",
        type=int,
        default=1,
        help="Ranks that a sequence is split over.",
        check=_size,
    ),
    CheckedFlag(
        "--context-parallel-algo",
        type=known_algorithm,
        metavar="ALGORITHM",
        default=RING_ALGO,
        choices=ALGORITHMS,
        choices_from="cp.planners",
        help="How attention reaches the keys of other ranks.",
        check=_algorithm,
    ),
    CheckedFlag(
        "--ulysses-degree-in-cp",
        type=int,
        help="Ranks that exchange heads in the hybrid algorithms.",
        check=_degree,
        ignored=_unused_degree,
    ),
    CheckedFlag(
        "--cp-window-size",
        type=int,
        default=1,
        help="Ranks of an inner ring of a double ring.",
        check=_window,
    ),
    *DOCUMENT_FLAGS,
    *MASK_FLAGS,
    CheckedFlag(
        "--context-parallel-kv-cache-policy",
        type=str,
        choices=("full", "half"),
        ignored=_idle_cache_policy,
        help="Keep for backward what a ring receives, or what heads were exchanged from: keys and values, "
        "or keys.",
        check=_cache_policy,
    ),
    CheckedFlag(
        "--context-parallel-cache-interval",
        type=int,
        default=0,
        help="Layers between those that keep it.",
        check=_cache_interval,
    ),
    CheckedFlag(
        "--use-cp-send-recv-overlap",
        help="A second group for a ring: ranks send in one and receive in the other. Computing and "
        "transfers overlap without it too.",
        ignored=_without_ring("--use-cp-send-recv-overlap"),
    ),
    CheckedFlag(
        "--cp-fetch-head-groups",
        type=int,
        default=1,
        help="Groups of key heads that are fetched one after another: less memory, and the next group "
        "travels while one is computed with.",
        check=_head_groups,
    ),
    Flag("--cp-log-counters", help="Log what attention sends in a step, and the scores it computes."),
    CheckedFlag(
        "--use-ulysses-allgather-kv",
        help="Gather keys and values along the sequence where heads are exchanged: for few key heads.",
        check=_gathered_keys,
    ),
    *LAYOUT_FLAGS,
    CheckedFlag(
        "--use-fused-ring-attention-update",
        help="Join the blocks of a ring by one operator of mindspeed-kernels.",
        check=_fused_update,
        ignored=_without_ring("--use-fused-ring-attention-update"),
    ),
    Flag("--megatron-cp-in-bnsd", help="Kernels of NPUs get tensors [b, n, s, d] instead of [s, b, n * d]."),
    Flag(
        "--cp-grad-comm-dtype",
        type=str,
        default="fp32",
        choices=("fp32", "model"),
        help="Dtype in which gradients of keys and values travel.",
    ),
    Flag(
        "--no-cp-distinct-dropout",
        inverts="cp_distinct_dropout",
        help="Drop the same places of hidden states on every rank of context parallelism.",
    ),
)
