"""Context parallelism inside a model of megatron-core: attention, rotary positions, batches, loss, groups."""
