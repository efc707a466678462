"""The model: flags of megatron-core's configuration classes, its layers, and what has to be corrected."""
