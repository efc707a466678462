"""Default construction of a GPT from megatron-core parts: chunks and data parallelism."""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.multi_token_prediction import get_mtp_num_layers_to_build
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from mindspeed_core.feature import hookimpl
from mindspeed_core.megatron.config_values import config_values
from mindspeed_core.megatron.fully_sharded.torch_fsdp2 import sharding_config, wrap_fully_sharded
from mindspeed_core.run import BoundarySchema, TensorSpec

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
    pg: ProcessGroupCollection,
) -> MegatronModule:
    """One GPTModel."""
    mtp_spec = None
    if get_mtp_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pg.pp.rank()):
        mtp_spec = session.call(
            "build_mtp_spec", args=args, config=config, layer_spec=layer_spec, vp_stage=vp_stage
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
    _choose_attention_backend(session, config)
    pp_size, pp_rank = pg.pp.size(), pg.pp.rank()
    virtual = args.virtual_pipeline_model_parallel_size
    total = pp_size * (virtual or 1)
    chunks: list[MegatronModule] = []
    for index in range(virtual or 1):
        vp_stage = index if virtual else None
        global_stage = index * pp_size + pp_rank
        chunk = session.call(
            "build_model_chunk",
            args=args,
            config=config,
            layer_spec=session.call("build_layer_spec", args=args, config=config, vp_stage=vp_stage),
            pre_process=global_stage == 0,
            post_process=global_stage == total - 1,
            vp_stage=vp_stage,
            global_stage=global_stage,
            pg=pg,
        )
        chunk.model_type = ModelType.encoder_or_decoder
        chunk.vp_stage = vp_stage
        for parameter in chunk.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        chunks.append(chunk)
    device = session.platform.device(args.local_rank)
    chunks = [chunk.to(device) for chunk in chunks]
    if config.bf16 or config.fp16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    return chunks


def _choose_attention_backend(session: Session, config: TransformerConfig) -> None:
    """Set what megatron-core sets for the backend, and take it back when the session closes.

    It insists on finding the variables unset or as they should be, and leaves them set.
    """
    wanted = {
        "flash": ("1", "0", "0"),
        "fused": ("0", "1", "0"),
        "unfused": ("0", "0", "1"),
        "local": ("0", "0", "0"),
        "auto": ("1", "1", "1"),
    }
    names = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
    if any(name in os.environ for name in names):
        return
    for name, value in zip(names, wanted[config.attention_backend.name]):
        session.setenv(name, value)


@hookimpl(trylast=True)
def boundary_schema(args: Namespace, config: TransformerConfig) -> BoundarySchema:
    """One hidden state ``[s, b, h]`` per micro-batch."""
    sequence = args.seq_length // config.context_parallel_size
    if config.sequence_parallel:
        sequence //= config.tensor_model_parallel_size
    shape = (sequence, args.micro_batch_size, config.hidden_size)
    return BoundarySchema((TensorSpec("hidden_states", shape, config.pipeline_dtype),))


@hookimpl(trylast=True)
def build_ddp_config(args: Namespace) -> DistributedDataParallelConfig:
    """Options of megatron-core's data parallelism, with Megatron-LM's rule for the bucket size."""
    if args.use_torch_fsdp2:
        return sharding_config(args)
    values = config_values(DistributedDataParallelConfig, args)
    values.update(
        grad_reduce_in_fp32=args.accumulate_allreduce_grads_in_fp32,
        # A step that is to be skipped must reach the update.
        check_for_nan_in_grad=args.check_for_nan_in_loss_and_grad and args.bad_step_action == "stop",
        bucket_size=args.ddp_bucket_size,
    )
    config = DistributedDataParallelConfig(**values)
    if not config.overlap_grad_reduce:
        config.bucket_size = None
    elif config.bucket_size is None:
        config.bucket_size = max(40_000_000, 1_000_000 * args.data_parallel_size * args.context_parallel_size)
    return config


@hookimpl(trylast=True)
def wrap_ddp(
    session: Session,
    args: Namespace,
    config: TransformerConfig,
    ddp_config: DistributedDataParallelConfig,
    model: list[MegatronModule],
    pg: ProcessGroupCollection,
) -> list[MegatronModule]:
    """megatron-core's DistributedDataParallel around every chunk; only the first is cut into buckets."""
    if args.ddp_num_buckets is not None and ddp_config.bucket_size is not None:
        # Megatron-LM's rule, which counts the parameters of this rank.
        elements = sum(parameter.numel() for chunk in model for parameter in chunk.parameters())
        ddp_config = replace(ddp_config, bucket_size=max(1, elements // args.ddp_num_buckets))
    if args.use_torch_fsdp2:
        return wrap_fully_sharded(session, config, ddp_config, model, pg)
    if args.use_megatron_fsdp:
        from mindspeed_core.megatron.fully_sharded.megatron_fsdp import wrap_megatron_sharded

        return wrap_megatron_sharded(session, config, ddp_config, model, pg)
    options: dict[str, Any] = {}
    if "pg_collection" in signature(DistributedDataParallel.__init__).parameters:
        options["pg_collection"] = pg
    wrapped: list[MegatronModule] = [
        DistributedDataParallel(
            config=config,
            ddp_config=ddp_config,
            module=chunk,
            # Overlap of later chunks would launch their reductions in an order that ranks do not share.
            disable_bucketing=index > 0,
            **options,
        )
        for index, chunk in enumerate(model)
    ]
    if args.data_parallel_random_init:
        for chunk in wrapped:
            chunk.broadcast_params()
    return wrapped


def unwrap(chunk: Any) -> MegatronModule:
    """The model inside the wrappers of data parallelism and Float16Module."""
    while isinstance(chunk, (_BaseDataParallel, Float16Module)):
        chunk = chunk.module
    return chunk
