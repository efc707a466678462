"""Default construction of a GPT from megatron-core parts."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.multi_token_prediction import get_mtp_num_layers_to_build
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from mindspeed_core.feature import hookimpl
from mindspeed_core.run import ChunkPlace
from mindspeed_megatron.chunk_places import places_of_rank
from mindspeed_megatron.data_parallel import ddp_config_of
from mindspeed_megatron.environment import restore_attention_choice
from mindspeed_megatron.expert_check import remember_placed
from mindspeed_megatron.fully_sharded.torch_fsdp2 import sharding_config
from mindspeed_megatron.layers import of_last_layer
from mindspeed_megatron.router_bias import draw_router_biases

if TYPE_CHECKING:
    from mindspeed_core.session import Session


@hookimpl(trylast=True)
def build_model_chunk(
    session: Session,
    args: Namespace,
    config: TransformerConfig,
    layer_spec: TransformerBlockSubmodules,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
    global_stage: int,
    pg: ProcessGroupCollection,
) -> MegatronModule:
    """Build one GPTModel."""
    mtp_spec = None
    if get_mtp_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pg.pp.rank()):
        decoder = layer_spec
        if not decoder.layer_specs:
            # Prediction layers copy the decoder's last one, which another stage holds.
            place = ChunkPlace(vp_stage, global_stage, pre_process, post_process)
            decoder = session.call(
                "build_layer_spec", args=args, config=of_last_layer(config), vp_stage=vp_stage, place=place
            )
        mtp_spec = session.call(
            "build_mtp_spec", args=args, config=config, layer_spec=decoder, vp_stage=vp_stage
        )
    return GPTModel(
        config=config,
        transformer_layer_spec=layer_spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        mtp_block_spec=mtp_spec,
        pg_collection=pg,
        vp_stage=vp_stage,
    )


@hookimpl(trylast=True)
def build_model(
    session: Session, args: Namespace, config: TransformerConfig, pg: ProcessGroupCollection
) -> list[MegatronModule]:
    """Build this rank's chunks stage by stage, move them to the device, cast them to the training dtype."""
    restore_attention_choice(session)
    chunks: list[MegatronModule] = []
    for place in places_of_rank(session, args, pg):
        vp_stage = place.vp_stage
        layer_spec = session.call(
            "build_layer_spec", args=args, config=config, vp_stage=vp_stage, place=place
        )
        remember_placed(session, layer_spec)
        chunk = session.call(
            "build_model_chunk",
            args=args,
            config=config,
            layer_spec=layer_spec,
            pre_process=place.pre_process,
            post_process=place.post_process,
            vp_stage=vp_stage,
            global_stage=place.global_stage,
            pg=pg,
        )
        chunk.model_type = ModelType.encoder_or_decoder
        chunk.vp_stage = vp_stage
        draw_router_biases(chunk, config, args.seed)
        for parameter in chunk.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        chunks.append(chunk)
    device = session.platform.device(args.local_rank)
    chunks = [chunk.to(device) for chunk in chunks]
    if config.bf16 or config.fp16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    return chunks


@hookimpl(trylast=True)
def build_ddp_config(args: Namespace) -> DistributedDataParallelConfig:
    """Build the options of data parallelism, with Megatron-LM's rule for the bucket size."""
    if args.use_torch_fsdp2:
        return sharding_config(args)
    # A step that is to be skipped must reach the update.
    stops = args.check_for_nan_in_loss_and_grad and args.bad_step_action == "stop"
    config = ddp_config_of(args, check_for_nan_in_grad=stops)
    if not config.overlap_grad_reduce:
        config.bucket_size = None
    elif config.bucket_size is None:
        config.bucket_size = max(40_000_000, 1_000_000 * args.data_parallel_size * args.context_parallel_size)
    return config
