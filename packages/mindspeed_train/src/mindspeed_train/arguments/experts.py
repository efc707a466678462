"""Validation of the arguments of a mixture of experts, and what is derived from them.

megatron-core asserts some of this while it builds, and some shows only in the first step or in the result.
"""

from __future__ import annotations

from argparse import Namespace

from mindspeed_train.arguments.errors import argument_error, option


def derive_experts(args: Namespace, *, training: bool = True) -> None:
    """Set the sizes of experts and of their parallelism that were not given.

    Args:
        args: the arguments; changed.
        training: gradients are computed, which copies of tokens on several ranks would count twice.

    Raises:
        ArgumentError: megatron-core cannot train such experts, or there are none to have these options.
    """
    tp, pp, ep = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.expert_model_parallel_size,
    )
    experts = args.num_experts
    if args.expert_tensor_parallel_size is None:
        args.expert_tensor_parallel_size = tp
    etp = args.expert_tensor_parallel_size
    if experts is None:
        if ep > 1:
            raise argument_error(
                args, "--expert-model-parallel-size", "there are no experts", "add --num-experts"
            )
        for name in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_layer_freq"):
            # One frequency for all layers is the default.
            if getattr(args, name) not in (None, 1):
                raise argument_error(args, option(name), "there are no experts", "add --num-experts")
        return
    if args.moe_ffn_hidden_size is None:
        args.moe_ffn_hidden_size = args.ffn_hidden_size
    if experts % ep:
        reason = f"is not divisible by --expert-model-parallel-size {ep}"
        raise argument_error(args, "--num-experts", reason, f"use a multiple of {ep}")
    if args.world_size % (etp * ep * pp):
        reason = (
            f"expert tensor x expert x pipeline = {etp} x {ep} x {pp} does not divide the world size "
            f"{args.world_size}"
        )
        remedy = "lower a size, for instance --expert-tensor-parallel-size 1"
        raise argument_error(args, "--expert-model-parallel-size", reason, remedy)
    if training and tp > 1 and not args.sequence_parallel:
        reason = "with tensor parallelism every rank would route every token"
        raise argument_error(args, "--num-experts", reason, "add --sequence-parallel")
    if args.add_bias_linear and etp > 1:
        reason = f"experts cut over --expert-tensor-parallel-size {etp} have no biases in megatron-core"
        remedy = "add --disable-bias-linear, or use --expert-tensor-parallel-size 1"
        raise argument_error(args, "--num-experts", reason, remedy)
    if args.add_bias_linear and args.moe_shared_expert_intermediate_size is not None:
        reason = "shared experts have no biases in megatron-core"
        remedy = "add --disable-bias-linear"
        raise argument_error(args, "--moe-shared-expert-intermediate-size", reason, remedy)
    if args.variable_seq_lengths and args.moe_token_dispatcher_type == "allgather":
        reason = "the ranks of experts would gather different numbers of tokens"
        remedy = "add --moe-token-dispatcher-type alltoall"
        raise argument_error(args, "--variable-seq-lengths", reason, remedy)
    _check_routing(args, experts)


def _check_routing(args: Namespace, experts: int) -> None:
    if args.moe_router_topk > experts:
        raise argument_error(args, "--moe-router-topk", f"exceeds --num-experts {experts}", "lower it")
    if isinstance(args.moe_layer_freq, list) and len(args.moe_layer_freq) != args.num_layers:
        reason = f"names {len(args.moe_layer_freq)} layers, --num-layers is {args.num_layers}"
        raise argument_error(args, "--moe-layer-freq", reason, "name every layer once")
    if "sinkhorn" in args.moe_router_load_balancing_type and any(args.moe_aux_loss_coeff):
        reason = "sinkhorn balances without a loss"
        remedy = "leave it out, or use --moe-router-load-balancing-type aux_loss"
        raise argument_error(args, "--moe-aux-loss-coeff", reason, remedy)
    if args.moe_apply_probs_on_input and args.moe_router_topk != 1:
        reason = f"a token goes to {args.moe_router_topk} experts with as many probabilities"
        raise argument_error(args, "--moe-apply-probs-on-input", reason, "add --moe-router-topk 1")
    factor = args.moe_expert_capacity_factor
    if args.moe_pad_expert_input_to_capacity and (factor or 0) * args.moe_router_topk > experts:
        reason = "an expert would be padded to more tokens than there are"
        remedy = f"use at most experts / top-k = {experts / args.moe_router_topk:g}"
        raise argument_error(args, "--moe-expert-capacity-factor", reason, remedy)
    if args.moe_router_topk == 1 and args.moe_router_score_function == "softmax":
        kinds = args.moe_router_load_balancing_type
        if not args.moe_router_pre_softmax and list(kinds) != ["sinkhorn"]:
            reason = "a softmax over the one chosen expert has no gradient"
            raise argument_error(args, "--moe-router-topk", reason, "add --moe-router-pre-softmax")
