"""megatron-core's data parallelism: its options from the arguments, and the wrappers around the chunks."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule

from mindspeed_core.feature import hookimpl
from mindspeed_megatron.config_values import config_values
from mindspeed_megatron.fully_sharded.torch_fsdp2 import wrap_fully_sharded

if TYPE_CHECKING:
    from mindspeed_core.session import Session


def ddp_config_of(args: Namespace, **values: Any) -> DistributedDataParallelConfig:
    """Fill the options of data parallelism from the arguments, by name; ``values`` overrule them."""
    filled = config_values(DistributedDataParallelConfig, args)
    filled |= {
        "grad_reduce_in_fp32": args.accumulate_allreduce_grads_in_fp32,
        "check_for_nan_in_grad": args.check_for_nan_in_loss_and_grad,
        "bucket_size": args.ddp_bucket_size,
    }
    return DistributedDataParallelConfig(**(filled | values))


@hookimpl(trylast=True)
def wrap_ddp(
    session: Session,
    args: Namespace,
    config: TransformerConfig,
    ddp_config: DistributedDataParallelConfig,
    model: list[MegatronModule],
    pg: ProcessGroupCollection,
) -> list[MegatronModule]:
    """Wrap every chunk in megatron-core's data parallelism; only the first is cut into buckets."""
    if args.ddp_num_buckets is not None and ddp_config.bucket_size is not None:
        # Megatron-LM's rule, which counts the parameters of this rank.
        elements = sum(parameter.numel() for chunk in model for parameter in chunk.parameters())
        ddp_config = replace(ddp_config, bucket_size=max(1, elements // args.ddp_num_buckets))
    if args.use_torch_fsdp2:
        return wrap_fully_sharded(session, config, ddp_config, model, pg)
    if args.use_megatron_fsdp:
        from mindspeed_megatron.fully_sharded.megatron_fsdp import wrap_megatron_sharded

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
