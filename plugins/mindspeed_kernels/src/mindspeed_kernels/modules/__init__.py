"""megatron-core modules that call the operators, and the functions that put them into a model's tree."""
