"""The flags of context parallelism, with the names that launch scripts use."""

from __future__ import annotations

from mindspeed_core.feature import Flag
from mindspeed_cp.features.mask_flags import MASK_FLAGS
from mindspeed_cp.options import ALGORITHMS, LAYOUTS, RING_ALGO

FLAGS = (
    Flag("--context-parallel-size", type=int, default=1, help="Ranks that a sequence is split over."),
    Flag(
        "--context-parallel-algo",
        type=str,
        default=RING_ALGO,
        choices=ALGORITHMS,
        choices_from="cp.planners",
        help="How attention reaches the keys of other ranks.",
    ),
    Flag("--ulysses-degree-in-cp", type=int, help="Ranks that exchange heads in the hybrid algorithms."),
    Flag("--cp-window-size", type=int, default=1, help="Ranks of an inner ring of a double ring."),
    *MASK_FLAGS,
    Flag(
        "--context-parallel-kv-cache-policy",
        type=str,
        choices=("full", "half"),
        help="Keep for backward what a ring receives, or what heads were exchanged from: keys and values, or "
        "keys.",
    ),
    Flag(
        "--context-parallel-cache-interval",
        type=int,
        default=0,
        help="Layers between those that keep it.",
    ),
    Flag(
        "--use-cp-send-recv-overlap",
        help="A second group for a ring: ranks send in one and receive in the other. Computing and "
        "transfers overlap without it too.",
    ),
    Flag(
        "--cp-fetch-head-groups",
        type=int,
        default=1,
        help="Groups of key heads that are fetched one after another: less memory, and the next group "
        "travels while one is computed with.",
    ),
    Flag("--cp-log-counters", help="Log what attention sends in a step, and the scores it computes."),
    Flag(
        "--use-ulysses-allgather-kv",
        help="Gather keys and values along the sequence where heads are exchanged: for one key head.",
    ),
    Flag(
        "--cp-layout",
        type=str,
        default="auto",
        choices=LAYOUTS,
        help="Which tokens a rank owns; auto suits the mask.",
    ),
    Flag(
        "--cp-chunks-per-rank",
        type=int,
        default=0,
        help="Chunks of each rank in a balanced layout; 0 takes the fewest that balance.",
    ),
    Flag(
        "--use-fused-ring-attention-update",
        help="Join the blocks of a ring by one operator of mindspeed-kernels.",
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
