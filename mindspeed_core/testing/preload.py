"""Imports of the fork server before its first child: torch, megatron-core and the standalone host.

Plugins are not among it: one that starts a device's runtime when it is imported would break every fork.
"""

from __future__ import annotations

import gc
from importlib import import_module

from mindspeed_core.hosts.standalone import HOST
from mindspeed_core.megatron.config_fields import config_fields
from mindspeed_core.platforms.broken_packages import take_broken_as_absent

MODULES = (
    "torch.distributed",
    "torch.utils._python_dispatch",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.datasets.helpers",
    "megatron.core.dist_checkpointing",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.optimizer_param_scheduler",
    "megatron.core.pipeline_parallel",
    "mindspeed_core.activation",
    "mindspeed_core.platforms.cpu",
    "mindspeed_core.testing.canonical",
    "mindspeed_core.instruments.communication",
    "mindspeed_core.instruments.kept_state",
    "mindspeed_core.instruments.memory",
    "mindspeed_core.testing.training",
)

take_broken_as_absent()
for name in (*MODULES, "mindspeed_core.hosts.standalone.loop", *HOST.stages, HOST.flags.partition(":")[0]):
    import_module(name)

# Read from megatron-core's sources, once in a process.
config_fields()

# Children share these objects: without a collection they are neither visited nor copied.
gc.collect()
gc.freeze()
