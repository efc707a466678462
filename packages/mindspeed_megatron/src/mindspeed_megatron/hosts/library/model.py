"""Default configuration, specification, chunks and data parallelism of a library session: the caller's."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import (
    LayerNormImpl,
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)

from mindspeed_core.errors import SessionError
from mindspeed_core.feature import hookimpl
from mindspeed_megatron import layers
from mindspeed_megatron.config_arguments import with_arguments

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer.module import MegatronModule

    from mindspeed_megatron.hosts.library.session import LibrarySession


@hookimpl(trylast=True)
def build_transformer_config(session: LibrarySession, args: Namespace) -> TransformerConfig:
    """Copy the caller's configuration, with what features changed of the arguments."""
    given, known, changed = session.given("build_transformer_config")
    # A feature that asks for the default again may have changed further arguments.
    later = {name for name, value in vars(args).items() if value is not known.get(name)}
    config = with_arguments(given, args, changed | later)
    layout = getattr(config, "pipeline_model_parallel_layout", None)
    if isinstance(layout, str):
        config.pipeline_model_parallel_layout = PipelineParallelLayerLayout.from_str(
            layout, config.pipeline_model_parallel_size
        )
    if session.mode == "inference":
        # A text that is continued has any length, which ranks cannot share evenly; results are the same.
        config.sequence_parallel = False
    return config


@hookimpl(trylast=True)
def build_layer_spec(
    session: LibrarySession, args: Namespace, config: TransformerConfig, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Return the caller's specification as the tree of a chunk; without one megatron-core's GPT layers."""
    base = session.given("build_layer_spec")
    if base is None:
        return layers.build_layer_spec(args=args, config=config, vp_stage=vp_stage)
    if isinstance(base, TransformerBlockSubmodules):
        return base
    if not isinstance(base, ModuleSpec):
        raise SessionError(
            f"layer_spec: base is a {type(base).__name__}; pass a ModuleSpec of a layer or the "
            "TransformerBlockSubmodules of a chunk"
        )
    if isinstance(base.module, type) and issubclass(base.module, TransformerBlock):
        return base.submodules
    alone = config.pipeline_model_parallel_size == 1
    count = config.num_layers if alone else get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(layer_specs=[base] * count, layer_norm=LayerNormImpl)


@hookimpl(trylast=True)
def build_model(session: LibrarySession) -> list[MegatronModule]:
    """Return the caller's chunks."""
    return session.given("build_model")


@hookimpl(trylast=True)
def build_ddp_config(session: LibrarySession) -> DistributedDataParallelConfig:
    """Return the caller's options."""
    return session.given("build_ddp_config")
