"""A stand-in for Megatron-LM's training package: its call graph and signatures, on parts of megatron-core.

Written for the tests of the host that lives in Megatron-LM's scripts. Who calls whom, what is imported by
name and what is returned are facts of core_v0.16.1; the bodies are as short as a training can be.
"""

from megatron.training.global_vars import get_args
from megatron.training.initialize import initialize_megatron
from megatron.training.training import get_model, pretrain

__all__ = ["get_args", "get_model", "initialize_megatron", "pretrain"]
