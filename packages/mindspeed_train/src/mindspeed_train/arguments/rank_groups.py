"""Checks of the order of ranks, and of the groups that share the optimizer's state."""

from __future__ import annotations

from argparse import Namespace

from mindspeed_train.arguments.errors import argument_error


def check_rank_order(args: Namespace) -> None:
    """Refuse an order of ranks in which the pipelines of experts are not those of the other layers.

    Raises:
        ArgumentError: names the sizes.
    """
    pp = args.pipeline_model_parallel_size
    if not args.use_tp_pp_dp_mapping or pp == 1 or not args.num_experts:
        return
    tp = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    of_experts = args.world_size // (tp * args.expert_model_parallel_size * pp)
    if of_experts != args.data_parallel_size:
        reason = (
            f"experts have {of_experts} data-parallel ranks and the other layers {args.data_parallel_size}, "
            "whose pipelines would not meet"
        )
        remedy = "leave it out, or choose --expert-tensor-parallel-size so that both are equal"
        raise argument_error(args, "--use-tp-pp-dp-mapping", reason, remedy)


def check_optimizer_instances(args: Namespace) -> None:
    """Refuse several instances of the distributed optimizer where they cannot be formed.

    Raises:
        ArgumentError: names the sizes.
    """
    instances, flag = args.num_distributed_optimizer_instances, "--num-distributed-optimizer-instances"
    if instances == 1:
        return
    if not args.use_distributed_optimizer:
        reason = "several instances share the state of the distributed optimizer"
        raise argument_error(args, flag, reason, "add --use-distributed-optimizer")
    ranks = args.data_parallel_size * args.context_parallel_size
    if ranks % instances:
        reason = f"does not divide the {ranks} ranks that hold the same weights"
        raise argument_error(args, flag, reason, "use a divisor")
    if args.use_megatron_fsdp or args.use_torch_fsdp2:
        reason = "parameters are sharded over all data-parallel ranks at once"
        raise argument_error(args, flag, reason, "use 1")
    if args.num_experts:
        experts = args.world_size // (
            (args.expert_tensor_parallel_size or args.tensor_model_parallel_size)
            * args.expert_model_parallel_size
            * args.pipeline_model_parallel_size
        )
        if experts % instances:
            reason = f"does not divide the {experts} ranks that hold the same experts"
            raise argument_error(args, flag, reason, "use a divisor")
