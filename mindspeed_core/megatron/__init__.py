"""What every host needs of megatron-core: configuration, layers, data parallelism, optimizer state, schedule.

Hosts build on these parts and never on each other.
"""
