"""What flags say about context parallelism, as one frozen record that modules get; no torch."""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from mindspeed_core.errors import ArgumentError

if TYPE_CHECKING:
    from mindspeed_cp.engine.planners import Grid

RING_ALGO, ULYSSES_ALGO, HYBRID_ALGO = "megatron_cp_algo", "ulysses_cp_algo", "hybrid_cp_algo"
GATHER_ALGO, ADAPTIVE_ALGO = "kvallgather_cp_algo", "adaptive_cp_algo"
HYBRID_ADAPTIVE_ALGO = "hybrid_adaptive_cp_algo"
ALGORITHMS = (RING_ALGO, ULYSSES_ALGO, HYBRID_ALGO, GATHER_ALGO, ADAPTIVE_ALGO, HYBRID_ADAPTIVE_ALGO)
WITH_RING = (RING_ALGO, HYBRID_ALGO)
WITH_HEADS = (HYBRID_ALGO, HYBRID_ADAPTIVE_ALGO)
WITH_REGROUPING = (ADAPTIVE_ALGO, HYBRID_ADAPTIVE_ALGO)
LAYOUTS = ("auto", "zigzag", "contiguous", "balanced", "doc_zigzag")


@dataclass(frozen=True)
class CPOptions:
    """The choices of a run.

    Attributes:
        size: ranks of context parallelism.
        algorithm: one of `ALGORITHMS`, or the name of a planner of another package.
        inner: ranks that exchange heads.
        window: ranks of an inner ring of a double ring.
        causal: a query sees no later key.
        layout: see `mindspeed_cp.engine.planners.Grid`.
        chunks: per rank in a balanced layout; 0 chooses.
        kv_cache: what is kept for backward: None, ``half`` (keys) or ``full`` (keys and values).
        cache_interval: layers between those that keep.
        wide_gradients: gradients of keys and values travel in float32.
        send_receive_overlap: a ring's ranks send and receive in two groups.
        gather_keys: keys and values are gathered along the sequence where heads are exchanged.
        head_groups: groups of key heads that are fetched one after another.
        fused_update: a ring joins its blocks by the operator of mindspeed-kernels.
        kernel_layout: in which kernels of NPUs get their tensors, ``SBH`` or ``BNSD``.
        regroup: rows of a given mask that see the same may be brought together.
        count_scores: work under a given mask is counted in scores, not in tiles.
        planned: the arrangement of ranks by a planner of another package.
    """

    size: int
    algorithm: str
    inner: int
    window: int
    causal: bool
    layout: str
    chunks: int
    kv_cache: str | None
    cache_interval: int
    wide_gradients: bool
    send_receive_overlap: bool = False
    gather_keys: bool = False
    head_groups: int = 1
    fused_update: bool = False
    kernel_layout: str = "SBH"
    regroup: bool = False
    count_scores: bool = False
    planned: Grid | None = None

    @property
    def outer(self) -> int:
        """Ranks that exchange keys."""
        return self.size // self.inner

    def kept(self, layer_number: int) -> str:
        """What a layer (numbered from 1) keeps for backward, see `mindspeed_cp.engine.attention.Options`."""
        if self.kv_cache is None or (layer_number - 1) % (self.cache_interval + 1):
            return "none"
        return {"half": "keys", "full": "all"}[self.kv_cache]


def cp_options(args: Namespace) -> CPOptions:
    """The record of validated arguments."""
    size, algorithm = args.context_parallel_size, args.context_parallel_algo
    inner, planned = 1, _planned(args)
    if planned is not None:
        inner = planned.inner
    elif algorithm == ULYSSES_ALGO:
        inner = size
    elif algorithm in WITH_HEADS:
        inner = args.ulysses_degree_in_cp
    return CPOptions(
        size=size,
        algorithm=algorithm,
        inner=inner,
        window=args.cp_window_size,
        causal=args.attention_mask_type == "causal",
        layout=args.cp_layout,
        chunks=args.cp_chunks_per_rank,
        kv_cache=args.context_parallel_kv_cache_policy,
        cache_interval=args.context_parallel_cache_interval,
        wide_gradients=args.cp_grad_comm_dtype == "fp32",
        send_receive_overlap=args.use_cp_send_recv_overlap,
        gather_keys=args.use_ulysses_allgather_kv,
        head_groups=args.cp_fetch_head_groups,
        fused_update=args.use_fused_ring_attention_update,
        kernel_layout="BNSD" if args.megatron_cp_in_bnsd else "SBH",
        regroup=algorithm in WITH_REGROUPING and not args.adaptive_cp_only_reschedule,
        count_scores=args.adaptive_cp_without_coarse,
        planned=planned,
    )


def _planned(args: Namespace) -> Grid | None:
    if args.context_parallel_algo in ALGORITHMS or args.context_parallel_size == 1:
        return None
    from mindspeed_cp.planner_choice import planned

    return planned(args.context_parallel_algo, args.context_parallel_size, args)


def problems(args: Namespace) -> list[str]:
    """Everything that is wrong with the arguments, one sentence each with numbers and the way out."""
    size, algorithm = args.context_parallel_size, args.context_parallel_algo
    # A configuration that is not there yet is checked when it comes.
    heads = (args.num_attention_heads or sys.maxsize) // args.tensor_model_parallel_size
    degree, window = args.ulysses_degree_in_cp, args.cp_window_size
    found: list[str] = []
    if algorithm == ULYSSES_ALGO and heads < size:
        found.append(
            f"ulysses_cp_algo needs at least one query head per rank: num_attention_heads / "
            f"tensor_model_parallel_size ({heads}) < context_parallel_size ({size}); use hybrid_cp_algo or "
            "megatron_cp_algo"
        )
    if algorithm in WITH_HEADS:
        found += _degree_problems(algorithm, size, degree, heads)
    elif degree is not None:
        found.append(
            f"--ulysses-degree-in-cp {degree} needs hybrid_cp_algo or hybrid_adaptive_cp_algo, got "
            f"{algorithm}"
        )
    found += _window_problems(args, size, algorithm, degree, window)
    found += _planner_problems(args, heads)
    found += _cache_problems(args, size, algorithm)
    found += _gathered_keys_problems(args, size, algorithm)
    found += _fetching_problems(args, algorithm)
    if args.use_fused_ring_attention_update:
        found += _fused_update_problems(algorithm)
    if args.use_cp_send_recv_overlap and algorithm not in WITH_RING:
        found.append(
            f"--use-cp-send-recv-overlap gives a ring a second group, and {algorithm} has no ring; use "
            "megatron_cp_algo or hybrid_cp_algo, or leave it out"
        )
    return found


def _planner_problems(args: Namespace, heads: int) -> list[str]:
    try:
        planned = _planned(args)
    except ArgumentError as error:
        return [str(error)]
    if planned is not None and planned.inner > heads:
        return [
            f"--context-parallel-algo {args.context_parallel_algo} exchanges heads among {planned.inner} "
            f"ranks, num_attention_heads / tensor_model_parallel_size is {heads}"
        ]
    return []


def _fused_update_problems(algorithm: str) -> list[str]:
    found = []
    if algorithm not in WITH_RING:
        found.append(
            f"--use-fused-ring-attention-update joins the blocks of a ring, and {algorithm} has no ring; use "
            "megatron_cp_algo or hybrid_cp_algo, or leave it out"
        )
    if find_spec("mindspeed_kernels") is None:
        found.append(
            "--use-fused-ring-attention-update is an operator of mindspeed-kernels, which is not installed: "
            "pip install 'mindspeed-cp[kernels]', or leave it out"
        )
    return found


def _fetching_problems(args: Namespace, algorithm: str) -> list[str]:
    groups = args.cp_fetch_head_groups
    if groups < 1:
        return [f"--cp-fetch-head-groups must be at least 1, got {groups}"]
    if groups > 1 and algorithm in (*WITH_RING, ULYSSES_ALGO):
        return [
            f"--cp-fetch-head-groups {groups} fetches keys in groups, and {algorithm} does not fetch; use "
            "kvallgather_cp_algo or an adaptive algorithm, or leave it out"
        ]
    return []


def _cache_problems(args: Namespace, size: int, algorithm: str) -> list[str]:
    policy, interval = args.context_parallel_kv_cache_policy, args.context_parallel_cache_interval
    found: list[str] = []
    if policy and size == 1:
        found.append(
            "context parallel size must be larger than 1 when --context-parallel-kv-cache-policy is set"
        )
    if policy and algorithm not in (*WITH_RING, ULYSSES_ALGO):
        found.append(
            f"--context-parallel-kv-cache-policy {policy} keeps what a ring receives, or what heads were "
            f"exchanged from, and {algorithm} fetches keys again; use megatron_cp_algo, hybrid_cp_algo or "
            "ulysses_cp_algo"
        )
    if interval and not policy:
        found.append(f"--context-parallel-cache-interval {interval} needs --context-parallel-kv-cache-policy")
    if interval < 0:
        found.append(f"--context-parallel-cache-interval must not be negative, got {interval}")
    if interval >= (args.num_layers or interval + 1):
        found.append(
            f"--context-parallel-cache-interval ({interval}) should be smaller than the number of layers "
            f"({args.num_layers})"
        )
    if policy and _recomputes_attention(args):
        found.append(
            f"--context-parallel-kv-cache-policy {policy} keeps what --recompute-granularity "
            f"{args.recompute_granularity} of attention throws away; leave out one of them"
        )
    return found


def _recomputes_attention(args: Namespace) -> bool:
    granularity = getattr(args, "recompute_granularity", None)
    modules = getattr(args, "recompute_modules", None) or ["core_attn"]
    return granularity == "full" or (granularity == "selective" and "core_attn" in modules)


def _gathered_keys_problems(args: Namespace, size: int, algorithm: str) -> list[str]:
    if not args.use_ulysses_allgather_kv:
        return []
    found: list[str] = []
    if size == 1:
        found.append("--use-ulysses-allgather-kv needs --context-parallel-size larger than 1, got 1")
    if algorithm != ULYSSES_ALGO:
        found.append(f"--use-ulysses-allgather-kv needs ulysses_cp_algo, got {algorithm}")
    if not args.group_query_attention:
        return [*found, "--use-ulysses-allgather-kv needs --group-query-attention"]
    heads = max(1, (args.num_query_groups or 1) // args.tensor_model_parallel_size)
    if heads > 1:
        found.append(
            f"--use-ulysses-allgather-kv sends all key heads to every rank, num_query_groups / "
            f"tensor_model_parallel_size is {heads}; it needs 1, leave it out for more"
        )
    return found


def _degree_problems(algorithm: str, size: int, degree: int | None, heads: int) -> list[str]:
    if degree is None:
        return [f"--ulysses-degree-in-cp must be specified in {algorithm}"]
    if degree < 1 or size % degree or size == degree:
        return [
            f"--context-parallel-size ({size}) must be a multiple of --ulysses-degree-in-cp ({degree}) and "
            "larger than it"
        ]
    if heads < degree:
        return [
            f"--ulysses-degree-in-cp ({degree}) needs as many query heads per rank, num_attention_heads / "
            f"tensor_model_parallel_size is {heads}"
        ]
    return []


def _window_problems(
    args: Namespace, size: int, algorithm: str, degree: int | None, window: int
) -> list[str]:
    if window == 1:
        return []
    if algorithm not in WITH_RING:
        return [f"--cp-window-size {window} needs megatron_cp_algo or hybrid_cp_algo, got {algorithm}"]
    ring = size // degree if algorithm == HYBRID_ALGO and degree and size % degree == 0 else size
    if not 1 <= window < ring:
        return [f"--cp-window-size must be at least 1 and below the ranks of the ring ({ring}), got {window}"]
    if ring % window:
        return [f"the ranks of the ring ({ring}) must be a multiple of --cp-window-size ({window})"]
    return []
