"""Flags of fully sharded data parallelism: parameters, gradients and optimizer state over the data ranks."""

from __future__ import annotations

from mindspeed_core.feature import Flag

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")

FULLY_SHARDED_FLAGS = (
    Flag(
        "--use-torch-fsdp2",
        help="Shard parameters, gradients and optimizer state over data parallelism, with torch's FSDP2.",
    ),
    Flag(
        "--torch-fsdp2-no-reshard-after-forward",
        inverts="torch_fsdp2_reshard_after_forward",
        help="Keep gathered parameters between forward and backward.",
    ),
    Flag(
        "--use-megatron-fsdp",
        help="Shard what --data-parallel-sharding-strategy names over data parallelism, with Megatron-FSDP.",
    ),
    Flag(
        "--data-parallel-sharding-strategy",
        type=str,
        default="no_shard",
        choices=STRATEGIES,
        help="What Megatron-FSDP shards: nothing, optimizer state, gradients too, parameters too.",
    ),
    Flag(
        "--no-gradient-reduce-div-fusion",
        inverts="gradient_reduce_div_fusion",
        help="Megatron-FSDP: divide gradients before they are reduced, not while (NCCL only).",
    ),
    Flag(
        "--suggested-communication-unit-size",
        type=int,
        help="Megatron-FSDP: elements that are gathered or reduced at once.",
    ),
    Flag(
        "--fsdp-double-buffer",
        help="Megatron-FSDP: keep two buffers for gathered parameters instead of making them anew.",
    ),
)
