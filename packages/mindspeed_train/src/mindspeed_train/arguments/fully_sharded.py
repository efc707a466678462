"""Checks of the arguments of fully sharded data parallelism: what would train wrongly, or not at all."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Collection
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from packaging.version import Version

from mindspeed_train.arguments.errors import argument_error

_FLAG = "--use-torch-fsdp2"
_MEGATRON = "--use-megatron-fsdp"


def check_fully_sharded(args: Namespace) -> None:
    """Refuse what fully sharded parameters cannot do.

    Raises:
        ArgumentError: names the flag, its value and the way out.
    """
    check_megatron_sharded(args)
    if not args.use_torch_fsdp2:
        if not args.torch_fsdp2_reshard_after_forward:
            raise argument_error(
                args, "--torch-fsdp2-no-reshard-after-forward", "nothing is sharded", f"add {_FLAG}"
            )
        return
    drop = "drop it, or " + _FLAG
    for flag, wrong, reason, remedy in (
        (
            "--pipeline-model-parallel-size",
            args.pipeline_model_parallel_size > 1,
            "parameters would be gathered again for every micro-batch in flight",
            "use 1",
        ),
        ("--num-experts", args.num_experts, "experts have data-parallel ranks of their own", drop),
        ("--use-distributed-optimizer", args.use_distributed_optimizer, "both shard the same state", drop),
        ("--overlap-grad-reduce", args.overlap_grad_reduce, "torch overlaps its reductions by itself", drop),
        ("--fp16", args.fp16, "loss scaling does not see sharded gradients", "use --bf16"),
        (
            "--calculate-per-token-loss",
            args.calculate_per_token_loss,
            "torch averages gradients over ranks, and megatron-core does not rescale them by tokens",
            drop,
        ),
    ):
        if wrong:
            raise argument_error(args, flag, f"{reason} with {_FLAG}", remedy)
    if not args.untie_embeddings_and_output_weights:
        reason = "one weight in two places cannot be sharded in both"
        raise argument_error(args, _FLAG, reason, "add --untie-embeddings-and-output-weights")


def check_megatron_sharded(args: Namespace) -> None:
    """Refuse what Megatron-FSDP of megatron-core 0.16.1 cannot do, or does wrongly, and derive what it needs.

    Raises:
        ArgumentError: names the flag, its value and the way out.
    """
    if not args.use_megatron_fsdp:
        _refuse_options_alone(args)
        return
    for missing, reason, remedy in (
        (args.use_torch_fsdp2, f"{_FLAG} shards the same parameters", "drop one of them"),
        (
            not args.use_distributed_optimizer,
            "its parts are updated by the distributed optimizer",
            "add --use-distributed-optimizer",
        ),
        (
            Version(version("megatron-core")) < Version("0.16"),
            "its parts are described as megatron-core 0.16 cuts them",
            "install megatron-core 0.16",
        ),
        (find_spec("einops") is None, "needs the package einops", "run pip install 'mindspeed-core[fsdp]'"),
    ):
        if missing:
            raise argument_error(args, _MEGATRON, reason, remedy)
    for flag, wrong, reason, remedy in _impossible_with_megatron(args):
        if wrong:
            raise argument_error(args, flag, f"{reason} with {_MEGATRON}", remedy)
    if args.data_parallel_sharding_strategy == "no_shard":
        # megatron-core's reduction after the backward pass leaves out every buffer.
        args.overlap_grad_reduce = True


def _impossible_with_megatron(args: Namespace) -> tuple[tuple[str, Any, str, str], ...]:
    """Return flag, whether it does harm, reason and way out."""
    strategy, drop = args.data_parallel_sharding_strategy, "drop it, or " + _MEGATRON
    # megatron-core 0.17 dropped the older kind of grouped experts.
    legacy = getattr(args, "moe_use_legacy_grouped_gemm", False)
    grouped = legacy or (args.moe_grouped_gemm and args.transformer_impl == "local")
    return (
        (
            "--pipeline-model-parallel-size",
            args.pipeline_model_parallel_size > 1,
            "megatron-core lays all ranks of the world out over data and tensor parallelism",
            "use 1",
        ),
        (
            "--fp16",
            args.fp16,
            "loss scaling asks every rank for a gradient of every parameter, of which ranks may hold nothing",
            "use --bf16",
        ),
        (
            "--overlap-grad-reduce",
            args.overlap_grad_reduce and strategy == "optim",
            "with --data-parallel-sharding-strategy optim megatron-core adds a rank's own gradient twice",
            "drop it, or shard with optim_grads",
        ),
        (
            "--expert-model-parallel-size",
            strategy == "no_shard" and args.expert_model_parallel_size > 1,
            "under the strategy no_shard the gradient norm would miss other ranks' experts",
            "shard with optim",
        ),
        ("--moe-grouped-gemm", grouped, "weights that hold all experts are not cut by rows", drop),
        (
            "--data-parallel-random-init",
            args.data_parallel_random_init,
            "ranks would hold parts of different weights",
            drop,
        ),
        ("--fp8-param-gather", args.fp8_param_gather, "checkpoints hold parameters in their own dtype", drop),
        (
            "--use-precision-aware-optimizer",
            args.use_precision_aware_optimizer,
            "its main parameters are not part of the shards",
            drop,
        ),
        ("--optimizer-cpu-offload", args.optimizer_cpu_offload, "the shards stay on their device", drop),
    )


def check_connections(kinds: Collection[str], args: Namespace) -> None:
    """Refuse an environment in which gathering and computing wait for each other.

    Raises:
        ArgumentError: the device has one hardware queue.
    """
    one_queue = "cuda" in kinds and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    if args.use_megatron_fsdp and one_queue:
        reason = "CUDA_DEVICE_MAX_CONNECTIONS=1 puts gathering and computing into one queue"
        raise argument_error(args, _MEGATRON, reason, "unset the variable")


def _refuse_options_alone(args: Namespace) -> None:
    for flag, given in (
        ("--data-parallel-sharding-strategy", args.data_parallel_sharding_strategy != "no_shard"),
        ("--suggested-communication-unit-size", args.suggested_communication_unit_size is not None),
        ("--fsdp-double-buffer", args.fsdp_double_buffer),
    ):
        if given:
            raise argument_error(args, flag, "it is an option of Megatron-FSDP", f"add {_MEGATRON}")
