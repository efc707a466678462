"""Fully sharded data parallelism: torch's FSDP2 and megatron-core's own, with canonical checkpoints."""
