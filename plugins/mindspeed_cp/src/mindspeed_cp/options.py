"""The choices of a run about context parallelism, as one frozen record; no torch."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from mindspeed_cp.algorithms import ADAPTIVE, ALGORITHMS, FETCHING, ULYSSES_ALGO, WITH_HEADS, WITH_RING
from mindspeed_cp.attention_flags import kept_policy
from mindspeed_cp.engine.planners import GATHER, RING, Grid
from mindspeed_cp.engine.tiles import TILE
from mindspeed_cp.planner_choice import planned


@dataclass(frozen=True)
class CPOptions:
    """The choices of a run by its flags; handed on whole.

    Attributes:
        grid: how ranks are arranged, and which tokens they own.
        kv_cache: what is kept for backward: None, ``half`` (keys) or ``full`` (keys and values).
        cache_interval: layers between those that keep.
        wide_gradients: gradients of keys and values travel in float32.
        send_receive_overlap: a ring's ranks send and receive in two groups.
        gather_keys: keys and values are gathered along the sequence where heads are exchanged.
        head_groups: groups of key heads that are fetched one after another.
        fused_update: a ring joins its blocks by the operator of mindspeed-kernels.
        kernel_layout: in which kernels of NPUs get their tensors, ``SBH`` or ``BNSD``.
    """

    grid: Grid
    kv_cache: str | None = None
    cache_interval: int = 0
    wide_gradients: bool = True
    send_receive_overlap: bool = False
    gather_keys: bool = False
    head_groups: int = 1
    fused_update: bool = False
    kernel_layout: str = "SBH"

    def kept(self, layer_number: int) -> str:
        """Return what a layer (numbered from 1) keeps for backward: ``none``, ``keys`` or ``all``."""
        if self.kv_cache is None or (layer_number - 1) % (self.cache_interval + 1):
            return "none"
        return {"half": "keys", "full": "all"}[self.kv_cache]


def cp_options(args: Namespace) -> CPOptions:
    """Build the record from validated arguments; equal arguments give equal records."""
    ring = args.context_parallel_algo in WITH_RING
    return CPOptions(
        grid=_grid(args),
        kv_cache=kept_policy(args),
        cache_interval=args.context_parallel_cache_interval,
        wide_gradients=args.cp_grad_comm_dtype == "fp32",
        send_receive_overlap=args.use_cp_send_recv_overlap and ring,
        gather_keys=args.use_ulysses_allgather_kv,
        head_groups=args.cp_fetch_head_groups,
        fused_update=args.use_fused_ring_attention_update and ring,
        kernel_layout="BNSD" if args.megatron_cp_in_bnsd else "SBH",
    )


def _grid(args: Namespace) -> Grid:
    size, algorithm, layout = args.context_parallel_size, args.context_parallel_algo, args.cp_layout
    if size == 1:
        return Grid(1)
    if algorithm not in ALGORITHMS:
        return planned(algorithm, size, args)
    inner = 1
    if algorithm == ULYSSES_ALGO:
        inner = size
    elif algorithm in WITH_HEADS:
        inner = args.ulysses_degree_in_cp
    if layout == "auto" and algorithm in ADAPTIVE:
        layout = "balanced"
    elif layout == "auto" and args.attention_mask_type != "causal":
        layout = "contiguous"
    return Grid(
        outer=size // inner,
        inner=inner,
        method=GATHER if algorithm in FETCHING else RING,
        window=args.cp_window_size,
        layout=layout,
        chunks=args.cp_chunks_per_rank,
        regroup=algorithm in ADAPTIVE and not args.adaptive_cp_only_reschedule,
        tile=1 if args.adaptive_cp_without_coarse else TILE,
    )
