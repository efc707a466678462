"""Flags of fully sharded data parallelism: parameters, gradients and optimizer state over the data ranks."""

from __future__ import annotations

from mindspeed_core.feature import Flag

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
)
