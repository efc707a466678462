"""Validation of the model's and its parallelism's arguments, and what is derived from them.

Whatever megatron-core would notice only while it builds or trains, or not at all, is said here before
anything starts, with the flag, its value and the way out.
"""

from __future__ import annotations

import re
from argparse import Namespace
from typing import TYPE_CHECKING

from mindspeed_train.arguments.errors import argument_error, option
from mindspeed_train.arguments.experts import derive_experts
from mindspeed_train.arguments.refusals import check_refused

if TYPE_CHECKING:
    from mindspeed_core.session import Session

_MOST_LAYERS = 100_000
_ACTIVATIONS = ("swiglu", "squared_relu", "quick_geglu")
_RECOMPUTE_MODULES = tuple("core_attn moe_act layernorm mla_up_proj mlp moe shared_experts".split())
"""The parts of a layer that megatron-core computes again."""


def check_model(session: Session, args: Namespace) -> None:
    """Translate older spellings, derive dtype, experts and pipeline, and refuse what cannot train here."""
    _older_spellings(args)
    check_refused(session, args)
    _check_activation(args)
    _check_deterministic(args)
    _derive_dtype(args)
    _derive_pipeline(args)
    derive_experts(args, training=session.mode == "train")
    _check_attention(session, args)
    _derive_recompute(session, args)
    _check_predictions(args)


def _older_spellings(args: Namespace) -> None:
    if not hasattr(args, "qk_l2_norm"):
        # megatron-core 0.15 has the norm, and no field for it.
        args.qk_l2_norm = False
    if args.use_rotary_position_embeddings:
        args.position_embedding_type = "rope"
    if args.recompute_activations:
        args.recompute_granularity = "selective"
    if args.num_experts is None:
        # A feature that brings experts names them like the field of the configuration.
        args.num_experts = getattr(args, "num_moe_experts", None)
    if args.num_experts == 0:
        args.num_experts = None


def _given(args: Namespace, *dests: str) -> list[str]:
    """Return the option strings of those attributes that are set."""
    return [
        option(dest) for dest in dests if (value := getattr(args, dest)) is not None and value is not False
    ]


def _check_activation(args: Namespace) -> None:
    chosen = _given(args, *_ACTIVATIONS)
    if len(chosen) > 1:
        raise argument_error(args, chosen[-1], f"{chosen[0]} is given too", "keep one of the two")
    if args.glu_linear_offset and not (args.swiglu or args.quick_geglu):
        raise argument_error(args, "--glu-linear-offset", "there is no gated activation", "add --quick-geglu")
    if args.activation_func_clamp_value is not None and not args.quick_geglu:
        raise argument_error(
            args, "--activation-func-clamp-value", "only quick GEGLU clamps", "add --quick-geglu"
        )


def _check_deterministic(args: Namespace) -> None:
    if args.deterministic_mode and args.cross_entropy_loss_fusion:
        reason = "does not give the same bits twice"
        raise argument_error(args, "--cross-entropy-loss-fusion", reason, "drop it, or --deterministic-mode")


def _derive_dtype(args: Namespace) -> None:
    import torch

    if args.fp16 and args.bf16:
        raise argument_error(args, "--fp16", "--bf16 is given too", "keep one of the two")
    args.params_dtype = torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else torch.float32
    if args.fp16 and args.loss_scale is None:
        # Under dynamic loss scaling a gradient that is not finite is the signal to lower the scale.
        args.check_for_nan_in_loss_and_grad = False
    if args.loss_scale is not None and args.loss_scale <= 0:
        raise argument_error(args, "--loss-scale", "must be above zero", "drop it: the scale adapts")
    if args.fp16_lm_cross_entropy and not args.fp16:
        raise argument_error(args, "--fp16-lm-cross-entropy", "the logits are not in float16", "add --fp16")
    if args.grad_reduce_in_bf16 and not args.bf16:
        raise argument_error(args, "--grad-reduce-in-bf16", "gradients are not in bfloat16", "add --bf16")
    if args.bf16 and not args.grad_reduce_in_bf16:
        # Megatron-LM's rule: bfloat16 gradients are accumulated and reduced in float32.
        args.accumulate_allreduce_grads_in_fp32 = True
    args.pipeline_dtype = torch.float32 if args.fp32_residual_connection else args.params_dtype


def _derive_pipeline(args: Namespace) -> None:
    pp = args.pipeline_model_parallel_size
    per_chunk, stages = args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank
    layout = args.pipeline_model_parallel_layout
    uneven = _given(args, "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    counted = _given(args, "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    if uneven and counted:
        reason = f"stages have the sizes of {uneven[0]}"
        raise argument_error(args, counted[0], reason, "keep one of the two, or give a layout")
    for flag in (*uneven, *counted, *_given(args, "pipeline_model_parallel_layout")):
        if pp == 1:
            raise argument_error(args, flag, "there is one pipeline stage", "drop it")
    if per_chunk is not None and stages is not None:
        reason = "--num-layers-per-virtual-pipeline-stage is given too"
        raise argument_error(args, "--num-virtual-stages-per-pipeline-rank", reason, "keep one of the two")
    if counted and args.mtp_num_layers:
        reason = "the stage of the predictions could be left without a decoder layer they take after"
        remedy = "use --pipeline-model-parallel-layout, with m between t and L"
        raise argument_error(args, counted[-1], reason, remedy)
    args.virtual_pipeline_model_parallel_size = None
    if layout:
        _derive_layout(args, layout, per_chunk or stages)
    elif uneven:
        if per_chunk is not None:
            reason = f"stages have different sizes with {uneven[0]}"
            remedy = "use --num-virtual-stages-per-pipeline-rank"
            raise argument_error(args, "--num-layers-per-virtual-pipeline-stage", reason, remedy)
        args.virtual_pipeline_model_parallel_size = stages if stages != 1 else None
    else:
        _derive_even(args, per_chunk, stages, len(counted))
    if (per_chunk or (stages or 1) > 1) and pp == 1:
        (flag, *_) = _given(
            args, "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"
        )
        remedy = "add --pipeline-model-parallel-size 2 or more, or drop it"
        raise argument_error(args, flag, "interleaving needs a pipeline", remedy)
    if args.virtual_pipeline_model_parallel_size is None:
        args.overlap_p2p_comm = False
    elif pp == 2 and not args.overlap_p2p_comm:
        # With two ranks both neighbours are the same peer, and megatron-core's batched exchange pairs
        # the sends of one direction with the receives of the other without an error.
        reason = (
            "at --pipeline-model-parallel-size 2 an interleaved pipeline's batched exchange mixes up its "
            "messages"
        )
        raise argument_error(args, "--no-overlap-p2p-communication", reason, "drop it")


def _derive_layout(args: Namespace, layout: str, chunks: int | None) -> None:
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    pp = args.pipeline_model_parallel_size
    if chunks is not None:
        reason = "says how many chunks there are; another flag does too"
        remedy = "drop --num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank"
        raise argument_error(args, "--pipeline-model-parallel-layout", reason, remedy)
    if _too_long(layout):
        reason = f"stands for more than {_MOST_LAYERS} layers"
        raise argument_error(args, "--pipeline-model-parallel-layout", reason, "lower a number behind *")
    try:
        parsed = PipelineParallelLayerLayout.from_str(layout, pp)
        apart = parsed.validate_layer_layout(num_layers=args.num_layers, mtp_num_layers=args.mtp_num_layers)
    except (AssertionError, ValueError, TypeError, KeyError) as error:
        remedy = "write stages of E, t, m and L between |, for instance Et*3|t*3L"
        raise argument_error(args, "--pipeline-model-parallel-layout", str(error), remedy) from error
    if args.mtp_num_layers and (apart or "m" not in layout.replace(",", "").split("|")[-1]):
        reason = "predictions take after a decoder layer beside them, and hand on tensors of another shape"
        remedy = "put m on the last stage between t and L"
        raise argument_error(args, "--pipeline-model-parallel-layout", reason, remedy)
    virtual = parsed.virtual_pipeline_model_parallel_size
    args.virtual_pipeline_model_parallel_size = virtual if virtual > 1 else None


def _too_long(layout: str) -> bool:
    """Return whether a layout stands for more layers than anybody has; megatron-core writes them all out."""
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        found = re.findall(repeated, layout)
        if any(len(times) > len(str(_MOST_LAYERS)) for _, times in found):
            return True
        if len(layout) + sum(len(part) * int(times) for part, times in found) > _MOST_LAYERS:
            return True
        layout = re.sub(repeated, lambda match: match[1] * int(match[2]), layout)
    return False


def _derive_even(args: Namespace, per_chunk: int | None, stages: int | None, counted: int) -> None:
    pp = args.pipeline_model_parallel_size
    layers = args.num_layers + counted
    plus = f" plus {counted} for embedding and loss" if counted else ""
    if layers % pp:
        reason = f"{plus.strip()} is not divisible by --pipeline-model-parallel-size {pp}".strip()
        remedy = f"use a multiple of {pp}, or --pipeline-model-parallel-layout"
        raise argument_error(args, "--num-layers", reason, remedy)
    per_rank = layers // pp
    if per_chunk is not None:
        if pp > 1 and per_rank % per_chunk:
            reason = f"does not divide the {per_rank} layers of a pipeline stage"
            raise argument_error(args, "--num-layers-per-virtual-pipeline-stage", reason, "use a divisor")
        stages = per_rank // per_chunk
        # One chunk per rank is no interleaving, as in Megatron-LM; megatron-core fails on a schedule of one.
        args.virtual_pipeline_model_parallel_size = stages if stages > 1 else None
    elif stages is not None and stages > 1:
        if per_rank % stages:
            reason = f"does not divide the {per_rank} layers of a pipeline stage"
            raise argument_error(args, "--num-virtual-stages-per-pipeline-rank", reason, "use a divisor")
        args.virtual_pipeline_model_parallel_size = stages


def _check_attention(session: Session, args: Namespace) -> None:
    if args.multi_latent_attention:
        if args.group_query_attention:
            raise argument_error(
                args, "--group-query-attention", "multi-latent attention shares keys otherwise", "drop it"
            )
        alone = session.mode == "train" and not args.sequence_parallel
        if args.tensor_model_parallel_size > 1 and args.qk_layernorm and alone:
            # The gradient of a norm that every rank applies alike is summed as if each had heads of its own.
            reason = (
                "megatron-core adds up the gradient of the query norm of multi-latent attention once per "
                "tensor-parallel rank"
            )
            raise argument_error(args, "--qk-layernorm", reason, "add --sequence-parallel")
        if args.softmax_scale is not None:
            reason = "multi-latent attention derives its own"
            raise argument_error(args, "--softmax-scale", reason, "use --mscale and --mscale-all-dim")
        if args.qk_l2_norm:
            raise argument_error(
                args, "--qk-l2-norm", "multi-latent attention has none", "use --qk-layernorm"
            )
    elif args.rope_type == "yarn":
        raise argument_error(
            args, "--rope-type", "megatron-core has it for multi-latent attention", "use --use-rope-scaling"
        )
    if args.qk_l2_norm and args.qk_layernorm:
        raise argument_error(args, "--qk-l2-norm", "--qk-layernorm is given too", "keep one of the two")
    if args.window_size is not None and (
        args.create_attention_mask_in_dataloader
        or (args.reset_attention_mask and not session.claims("--reset-attention-mask"))
    ):
        # The local softmax builds the window's mask in place of the one it is given.
        reason = "local attention ignores the mask of the dataloader inside a window"
        remedy = "drop --create-attention-mask-in-dataloader and --reset-attention-mask"
        raise argument_error(args, "--window-size", reason, remedy)
    if args.window_attn_skip_freq is not None and args.window_size is None:
        raise argument_error(args, "--window-attn-skip-freq", "there is no window", "add --window-size")


def _check_predictions(args: Namespace) -> None:
    if args.mtp_num_layers is None:
        return
    if args.mtp_num_layers < 1:
        raise argument_error(args, "--mtp-num-layers", "must be at least 1", "drop the flag")
    if args.pipeline_model_parallel_size > 1 and args.position_embedding_type == "learned_absolute":
        reason = "the last pipeline stage would train position embeddings of its own for them"
        raise argument_error(args, "--mtp-num-layers", reason, "add --position-embedding-type rope")
    uniform = args.recompute_granularity == "full" and args.recompute_method == "uniform"
    if uniform and args.recompute_num_layers != 1:
        reason = (
            "megatron-core does not recompute them with --recompute-method uniform "
            f"--recompute-num-layers {args.recompute_num_layers}"
        )
        raise argument_error(args, "--mtp-num-layers", reason, "use 1, or --recompute-method block")
    if args.pipeline_model_parallel_size > 1 and not args.untie_embeddings_and_output_weights:
        reason = (
            "on a stage of its own, megatron-core gives predictions a second output layer that nothing uses"
        )
        raise argument_error(args, "--mtp-num-layers", reason, "add --untie-embeddings-and-output-weights")


def _derive_recompute(session: Session, args: Namespace) -> None:
    if args.recompute_granularity == "full":
        if args.recompute_method is None:
            raise argument_error(
                args, "--recompute-granularity", "needs a method", "add --recompute-method uniform or block"
            )
        if not args.recompute_num_layers:
            raise argument_error(
                args, "--recompute-granularity", "needs a number of layers", "add --recompute-num-layers 1"
            )
    modules = args.recompute_modules or ()
    brought = session.claims("--recompute-modules")
    unknown = [name for name in modules if name not in _RECOMPUTE_MODULES]
    if args.recompute_granularity == "selective" and unknown and not brought:
        reason, known = f"has no part {unknown[0]!r} to compute again", ", ".join(_RECOMPUTE_MODULES)
        raise argument_error(args, "--recompute-modules", reason, f"choose from {known}")
    if (
        args.recompute_granularity == "selective"
        and "mlp" in modules
        and args.add_bias_linear
        and not brought
    ):
        # The bias leaves the checkpointed function as it is, becomes its result, and backward never ends.
        reason = "megatron-core recomputes a dense MLP with a bias for ever"
        remedy = "add --disable-bias-linear, or leave mlp out"
        raise argument_error(args, "--recompute-modules", reason, remedy)
    if args.recompute_granularity == "selective" and args.recompute_num_layers is not None:
        reason = "selective recomputation covers every layer"
        remedy = "drop it, or use --recompute-granularity full"
        raise argument_error(args, "--recompute-num-layers", reason, remedy)
