"""Context parallelism inside a model of megatron-core: core attention, rotary positions, batches, loss, groups."""
