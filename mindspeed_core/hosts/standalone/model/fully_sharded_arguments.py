"""Validation of the arguments of fully sharded data parallelism: what would train wrongly, or not at all."""

from __future__ import annotations

from argparse import Namespace

from mindspeed_core.errors import ArgumentError

_FLAG = "--use-torch-fsdp2"


def check_fully_sharded(args: Namespace) -> None:
    """Refuse what fully sharded parameters cannot do.

    Raises:
        ArgumentError: names the flag, its value and the way out.
    """
    if not args.use_torch_fsdp2:
        if not args.torch_fsdp2_reshard_after_forward:
            raise ArgumentError(
                "--torch-fsdp2-no-reshard-after-forward", None, "nothing is sharded", f"add {_FLAG}"
            )
        return
    drop = "drop it, or " + _FLAG
    for flag, value, reason, remedy in (
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
        if value:
            shown = None if value is True else value
            raise ArgumentError(flag, shown, f"{reason} with {_FLAG}", remedy)
    if not args.untie_embeddings_and_output_weights:
        raise ArgumentError(
            _FLAG,
            None,
            "one weight in two places cannot be sharded in both",
            "add --untie-embeddings-and-output-weights",
        )
