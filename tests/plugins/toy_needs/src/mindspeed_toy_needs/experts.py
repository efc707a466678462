"""A mixture of experts from megatron-core's own parts, switched on by a feature.

The configuration is filled from arguments by name, so a feature that adds arguments adds fields; process
groups that the host does not make are made before it looks whether there are any.
"""

from __future__ import annotations

from argparse import Namespace

from megatron.core import parallel_state


def with_experts(args: Namespace) -> Namespace:
    """The arguments with megatron-core's fields for experts."""
    return Namespace(
        **{
            **vars(args),
            "num_moe_experts": args.toy_experts,
            "expert_model_parallel_size": args.toy_expert_parallel,
            "moe_router_topk": 2,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
        }
    )


def initialize_groups(args: Namespace) -> None:
    """megatron-core's groups, with expert parallelism among them."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        create_gloo_process_groups=True,
    )
