"""Imports of the fork server before its first child: torch, megatron-core and the standalone host.

Of plugins only declarations are among it, which load neither torch nor megatron: a module that starts a
device's runtime when it is imported would break every fork. Tests of packages that know better name further
modules in the environment variable ``MINDSPEED_WORLD_IMPORTS``, divided by commas.
"""

from __future__ import annotations

import gc
import logging
import os
from importlib import import_module

from mindspeed_core.registry import Registry
from mindspeed_megatron.broken_packages import take_broken_as_absent
from mindspeed_megatron.config_fields import config_fields
from mindspeed_megatron.rank_check import content_facts
from mindspeed_testing.fork_server import FURTHER_IMPORTS
from mindspeed_testing.shared_order import share_orders
from mindspeed_train import HOST

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
    "mindspeed_megatron.devices.cpu_patches",
    "mindspeed_megatron.activation_offload",
    "mindspeed_megatron.devices.cuda_calls",
    "mindspeed_megatron.devices.device_arguments",
    "mindspeed_megatron.dropped_storages",
    "mindspeed_megatron.output_checkpoint",
    "mindspeed_megatron.tensor_norms",
    "mindspeed_megatron.touch_points.startup",
    "mindspeed_megatron.upstream",
    "mindspeed_testing.canonical",
    "mindspeed_megatron.instruments.communication",
    "mindspeed_megatron.instruments.host_buffers",
    "mindspeed_megatron.instruments.kept_state",
    "mindspeed_megatron.instruments.memory",
    "mindspeed_testing.lagging.backend_rules",
    "mindspeed_testing.lagging.compiled_dropout",
    "mindspeed_testing.lagging.cuda_runtime",
    "mindspeed_testing.saved_state",
    "mindspeed_testing.training",
    "mindspeed_train.arguments.from_checkpoint",
    "mindspeed_train.arguments.stand_downs",
)

take_broken_as_absent()
for name in (*MODULES, "mindspeed_train.loop", *HOST.stages, HOST.flags.partition(":")[0]):
    import_module(name)

# Read from the sources of megatron-core and of plugins, once in a process.
config_fields()
content_facts(Registry.discover())
share_orders()

for name in filter(None, os.environ.get(FURTHER_IMPORTS, "").split(",")):
    try:
        import_module(name)
    except ModuleNotFoundError:
        continue
    except Exception as error:
        # Whoever needs it says so; a child without it does what it did before.
        logging.getLogger("mindspeed_core").warning(
            "%s: %s cannot be imported: %s", FURTHER_IMPORTS, name, error
        )

# Children share these objects: without a collection they are neither visited nor copied.
gc.collect()
gc.freeze()
