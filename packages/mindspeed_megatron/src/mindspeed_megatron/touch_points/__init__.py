"""Touch points: every symbol of megatron-core that the project relies on, by version of megatron-core."""
