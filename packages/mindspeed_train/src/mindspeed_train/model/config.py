"""Default construction of the model's configuration: every field from the arguments, and what is derived."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_block import get_num_layers_to_build

from mindspeed_core.errors import ArgumentError
from mindspeed_core.feature import hookimpl
from mindspeed_megatron.config_values import config_values
from mindspeed_megatron.uneven_partition import build_for_any_partition, leaves_partition
from mindspeed_train.arguments.configuration_errors import refused_configuration

if TYPE_CHECKING:
    from mindspeed_core.session import Session


@hookimpl(trylast=True)
def build_transformer_config(session: Session, args: Namespace) -> TransformerConfig:
    """Fill megatron-core's configuration: by name, and the fields that Megatron-LM names otherwise."""
    kind = MLATransformerConfig if args.multi_latent_attention else TransformerConfig
    values = config_values(kind, args)
    values.update(
        persist_layer_norm=False,
        # gloo reads the memory of a send in flight; only a device runtime orders its release after the send.
        deallocate_pipeline_outputs="cpu" not in session.platform.kinds() or not args.overlap_p2p_comm,
        pipeline_dtype=args.pipeline_dtype,
        batch_p2p_comm=not args.overlap_p2p_comm,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
    )
    values.update(_activation(args))
    if args.variable_seq_lengths and args.num_experts is None:
        # megatron-core refuses the default dispatcher, also where there is nothing to dispatch.
        values["moe_token_dispatcher_type"] = "alltoall"
    if args.init_method_xavier_uniform:
        values["init_method"] = torch.nn.init.xavier_uniform_
    try:
        config = (
            build_for_any_partition(lambda given: kind(**given), values)
            if leaves_partition(session)
            else kind(**values)
        )
    except (AssertionError, ValueError, TypeError, ArithmeticError, ImportError) as error:
        raise refused_configuration(args, session.provenance, error) from error
    check_recomputed_layers(config)
    return config


def check_recomputed_layers(config: TransformerConfig) -> None:
    """Refuse units of recomputed layers that reach beyond the last layer of a chunk: an IndexError in step 1.

    Raises:
        ArgumentError: the unit does not divide the layers of a chunk of some stage.
    """
    unit = config.recompute_num_layers
    if config.recompute_granularity != "full" or config.recompute_method != "uniform" or unit == 1:
        return
    for rank in range(config.pipeline_model_parallel_size):
        for chunk in range(config.virtual_pipeline_model_parallel_size or 1):
            layers = _layers_of_chunk(config, rank, chunk)
            if layers % unit:
                raise ArgumentError(
                    "--recompute-num-layers",
                    unit,
                    f"does not divide the {layers} layers of a model chunk of pipeline rank {rank}",
                    "use 1, or --recompute-method block",
                )


def _layers_of_chunk(config: TransformerConfig, pp_rank: int, chunk: int) -> int:
    layout: Any = config.pipeline_model_parallel_layout
    if layout is not None:
        return int(layout.layout[pp_rank][chunk].count(LayerType.decoder))
    virtual = config.virtual_pipeline_model_parallel_size is not None
    return get_num_layers_to_build(config, vp_stage=chunk if virtual else None, pp_rank=pp_rank)


def _activation(args: Namespace) -> dict[str, Any]:
    if args.swiglu:
        return {
            "activation_func": torch.nn.functional.silu,
            "gated_linear_unit": True,
            "bias_activation_fusion": args.bias_swiglu_fusion,
        }
    if args.quick_geglu:
        from megatron.core.fusions.fused_bias_geglu import quick_gelu

        # megatron-core fuses it for routed experts alone, and has one switch for all layers.
        return {"activation_func": quick_gelu, "gated_linear_unit": True, "bias_activation_fusion": False}
    if args.squared_relu:
        from megatron.core.activations import squared_relu

        return {"activation_func": squared_relu, "bias_activation_fusion": False}
    # The fused GELU adds a bias, and knows nothing of an expert's weight per token.
    fused = args.bias_gelu_fusion and args.add_bias_linear and args.num_experts is None
    return {"bias_activation_fusion": fused}
