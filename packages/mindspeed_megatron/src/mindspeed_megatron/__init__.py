"""Parts of megatron-core that every host needs: configuration, layers, data parallelism, optimizer, schedule.

Hosts build on these parts and never on each other.
"""

__version__ = "0.1.0"
