"""Options of megatron-core that cannot be honoured here: they stand down, or are refused before training.

An option that only chooses how the same numbers are computed stands down with a note (`stand_downs`); one
whose absence would train something else is refused. Some options name kernels of TransformerEngine or other
packages, which megatron-core looks for only in the first step, and some need a training loop that does more
than this one. A feature that declares the flag has taken care of it, and nothing is refused then.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import ArgumentError
from mindspeed_megatron.config_fields import config_fields
from mindspeed_megatron.config_flags import dest_of, flag_of, why_excluded
from mindspeed_train.arguments.errors import option

if TYPE_CHECKING:
    from mindspeed_core.session import Session

_LEAVE_OUT = "leave it out"
_TE = "--transformer-impl transformer_engine with TransformerEngine installed, or leave it out"


@dataclass(frozen=True)
class Refusal:
    """One option that cannot be honoured.

    Attributes:
        dest: the attribute of the arguments; its default is never refused.
        reason: why not.
        remedy: the way out.
        values: the values concerned; empty for any that is set.
        without: ``"te"`` when TransformerEngine's layers can do it, the name of a package that can, or empty
            when nothing can.
        platforms: only on these; empty for all.
        stands_down: it changes no number, and is left out with a note instead.
        instead: the value that it has then; by default that of a run without the flag.
    """

    dest: str
    reason: str
    remedy: str = _LEAVE_OUT
    values: tuple[Any, ...] = ()
    without: str = ""
    platforms: tuple[str, ...] = ()
    stands_down: bool = False
    instead: Any = None


def _te(dests: str, reason: str, values: tuple[Any, ...] = ()) -> tuple[Refusal, ...]:
    return tuple(Refusal(dest, reason, f"use {_TE}", values, "te") for dest in dests.split())


def _without_effect(refusals: Iterable[Refusal], instead: Any = None) -> tuple[Refusal, ...]:
    return tuple(replace(refusal, stands_down=True, instead=instead) for refusal in refusals)


def _refused(
    dests: str, reason: str, remedy: str = _LEAVE_OUT, without: str = "", platforms: tuple[str, ...] = ()
) -> tuple[Refusal, ...]:
    return tuple(Refusal(dest, reason, remedy, (), without, platforms) for dest in dests.split())


_MUON = "megatron-core's Muon needs the package emerging_optimizers, and no other one is active"
_OUR_MUON = "use --optimizer muon of the package mindspeed-optim, or leave it out"
REFUSALS: tuple[Refusal, ...] = (
    *_te(
        "fp8 fp8_param_gather fp8_dot_product_attention fp8_multi_head_attention fp4 fp4_param "
        "first_last_layers_bf16 moe_router_padding_for_quantization moe_router_padding_for_fp8 "
        "activation_func_fp8_input_store tp_only_amax_red reuse_grad_buf_for_mxfp8_param_ag fp8_recipe "
        "fp8_quantizer_factory fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad "
        "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 fp4_recipe fp4_quantizer_factory "
        "disable_parameter_transpose_cache fp4_param_gather fp8_output_proj",
        "the low-precision matrix products are TransformerEngine's",
    ),
    *_without_effect(
        (
            *_te(
                "tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs "
                "tp_comm_overlap_rs_dgrad tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 "
                "tp_comm_bootstrap_backend",
                "the overlapped linears are TransformerEngine's",
            ),
            *_te("moe_permute_fusion moe_router_fusion", "the fused kernels are TransformerEngine's"),
            *_te("use_te_activation_func", "the activations are TransformerEngine's"),
            *_te("use_te_rng_tracker", "the generator tracker is TransformerEngine's"),
            *_te("log_max_attention_logit", "only TransformerEngine's attention reports its largest logit"),
            *_te(
                "attention_backend",
                "the backend is one of TransformerEngine's attention",
                ("flash", "fused"),
            ),
            *_te("cross_entropy_fusion_impl", "the kernel is TransformerEngine's", ("te",)),
            *_te(
                "cpu_offloading cpu_offloading_num_layers cpu_offloading_retain_pinned_cpu_buffers",
                "moving activations to the host is TransformerEngine's, and takes less memory",
            ),
            *_te("use_precision_aware_optimizer", "the optimizer's kernel is TransformerEngine's"),
            *_te(
                "delay_wgrad_compute overlap_dispatch_backward_with_experts_wgrad",
                "only TransformerEngine's linears can delay their weight gradient",
            ),
            *_te(
                "use_transformer_engine_op_fuser use_grouped_gemm_for_dense_mlp "
                "use_grouped_gemm_for_shared_expert moe_single_grouped_weight moe_single_grouped_bias "
                "mla_down_proj_fusion",
                "the joined products are TransformerEngine's",
            ),
            *_te(
                "moe_paged_stash moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda "
                "moe_paged_stash_buffer_size_factor_cpu",
                "pages of saved tensors belong to TransformerEngine's experts",
            ),
            *_te("fused_single_qkv_rope", "the fused rotary kernel is TransformerEngine's"),
            *_refused("config_logger_dir", "megatron-core cannot write down the process groups it is given"),
            *_refused("moe_per_layer_logging", "this host reports the mean over the layers"),
            Refusal("memory_efficient_layer_norm", "the kernel is Apex's", without="apex"),
            Refusal(
                "moe_grouped_gemm",
                "neither TransformerEngine's layers nor the package grouped_gemm are there, and experts run "
                "one after the other",
                without="grouped_gemm",
            ),
            Refusal(
                "moe_use_legacy_grouped_gemm",
                "the package grouped_gemm is not installed",
                without="grouped_gemm",
            ),
            *_refused(
                "moe_enable_deepep moe_deepep_num_sms moe_hybridep_num_sms moe_flex_dispatcher_backend "
                "moe_permute_fusion_into_hybridep moe_hybridep_num_blocks_permute "
                "moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms_preprocessing "
                "moe_hybridep_pad_uneven_dispatch_inputs moe_flex_dispatcher_num_sms "
                "moe_ncclep_static_shape moe_ncclep_zero_copy",
                "belongs to the flexible dispatcher, which needs the package deep_ep and CUDA",
                without="deep_ep",
            ),
            *_refused(
                "defer_embedding_wgrad_compute wgrad_deferral_limit",
                "megatron-core defers weight gradients only where an Apex kernel adds them up",
            ),
            *_refused(
                "enable_cuda_graph external_cuda_graph cuda_graph_scope cuda_graph_warmup_steps",
                "this host captures no graphs",
            ),
            Refusal(
                "cuda_graph_impl", "this host captures no graphs", values=("local", "transformer_engine")
            ),
            *_refused(
                "overlap_moe_expert_parallel_comm ep_overlap_early_attn_memory_release "
                "high_priority_a2a_comm_stream",
                "the schedule that pairs forward and backward passes needs TransformerEngine's layers and "
                "streams",
            ),
            *_refused(
                "fine_grained_activation_offloading offload_modules min_offloaded_tensor_size "
                "fine_grained_offloading_max_inflight_offloads activation_offload_fraction "
                "delta_offload_bytes_across_pp_ranks delay_offload_until_cuda_graph",
                "moving activations between memories needs CUDA streams, and takes less memory",
            ),
            *_refused(
                "num_microbatches_with_partial_activation_checkpoints",
                "recomputation is the same for every micro-batch here",
            ),
            *_refused(
                "overlap_param_gather_with_optimizer_step", "the optimizer updates all chunks together here"
            ),
            *_refused(
                "hierarchical_context_parallel_sizes", "the groups of two levels are TransformerEngine's"
            ),
            *_refused("pipeline_model_parallel_comm_backend", "the platform chooses the backend"),
            *_refused(
                "ddp_average_in_collective",
                "gloo has no averaging reduction; gradients are divided before they are summed",
                platforms=("cpu",),
            ),
            *_refused(
                "optimizer_cpu_offload optimizer_offload_fraction use_torch_optimizer_for_cpu_offload "
                "overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params",
                "parameters are on the CPU already",
                platforms=("cpu",),
            ),
        )
    ),
    *_without_effect(
        (
            Refusal(
                "moe_token_dispatcher_type",
                "the flexible dispatcher needs the package deep_ep and CUDA; alltoall sends the same tokens",
                values=("flex",),
                without="deep_ep",
            ),
        ),
        instead="alltoall",
    ),
    *_te("moe_latent_size", "the latent projections are TransformerEngine's linears"),
    *_te(
        "qk_clip qk_clip_alpha qk_clip_threshold",
        "only TransformerEngine's attention reports its largest logit",
    ),
    *_te(
        "moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size",
        "only TransformerEngine's experts interleave gates and values",
    ),
    *_refused(
        "moe_expert_rank_capacity_factor",
        "the capacity of a rank belongs to the flexible dispatcher, which needs the package deep_ep and CUDA",
        "use --moe-expert-capacity-factor, or leave it out",
        without="deep_ep",
    ),
    *_te("flash_attention_version", "the kernels of FlashAttention are called by TransformerEngine's layers"),
    *_te("batch_invariant_mode", "the kernels are TransformerEngine's and FlashAttention's"),
    *_refused("apply_residual_connection_post_layernorm", "the layers of megatron-core's GPT ignore it"),
    *_refused("moe_enable_routing_replay", "nothing records routes here that could be replayed"),
    *_refused(
        "use_kitchen use_kitchen_attention kitchen_attention_backend",
        "needs the package nvidia_kitchen",
        without="nvidia_kitchen",
    ),
    Refusal(
        "experimental_attention_variant",
        "needs the packages of its kernels (fla) and CUDA",
        values=("gated_delta_net",),
        without="fla",
    ),
    Refusal(
        "experimental_attention_variant",
        "sparse attention is built from TransformerEngine's layers",
        f"use {_TE}",
        ("dsa",),
        "te",
    ),
    *_te(
        "dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_loss_coeff "
        "dsa_indexer_use_sparse_loss dsa_indexer_topk_freq dsa_indexer_skip_topk_offset dsa_kernel_backend "
        "dsa_indexer_rope_interleaved dsa_indexer_rotate_activation dsa_indexer_scoring_relu "
        "dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32",
        "sparse attention is built from TransformerEngine's layers",
    ),
    *_refused(
        "linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim "
        "linear_num_key_heads linear_num_value_heads",
        "linear attention needs the package fla and CUDA",
        without="fla",
    ),
    *_refused(
        "is_hybrid_model hybrid_override_pattern mamba_state_dim mamba_head_dim mamba_num_groups "
        "mamba_num_heads use_mamba_mem_eff_path",
        "Mamba layers need the CUDA packages mamba_ssm and causal_conv1d",
        "train a GPT without them",
    ),
    *_refused(
        "heterogeneous_layers_config_path",
        "this host builds the same attention in every layer",
        "choose dense and expert layers with --moe-layer-freq",
    ),
    *_refused("moe_use_upcycling", "this host does not convert checkpoints", "train from scratch"),
    *_refused(
        "muon_momentum muon_use_nesterov muon_scale_mode muon_fp32_matmul_prec muon_num_ns_steps "
        "muon_tp_mode muon_extra_scale_factor",
        _MUON,
        _OUR_MUON,
    ),
    # It is on without a flag, also where megatron-core has no such field.
    Refusal("muon_split_qkv", _MUON, _OUR_MUON, values=(False,)),
    *_refused("hybrid_context_parallel max_seqlen_per_dp_cp_rank", "it needs a data loader of its own"),
    *_refused("enable_autocast", "parameters are cast as a whole", "use --bf16 or --fp16"),
    *_refused("mrope_section", "positions of text have one dimension", "use --position-embedding-type rope"),
)


def check_refused(session: Session, args: Namespace) -> None:
    """Refuse the first option that cannot be honoured.

    Raises:
        ArgumentError: names flag, value, reason and the way out.
    """
    for refusal in REFUSALS:
        value = getattr(args, refusal.dest, None)
        if not stands_against(refusal, args, session.platform.kinds()):
            continue
        flag = option_of(refusal.dest)
        if not session.claims(flag):
            shown = None if isinstance(value, bool) else value
            raise ArgumentError(flag, shown, refusal.reason, refusal.remedy)


def option_of(dest: str) -> str:
    """Return the option string of an attribute, also of one that a configuration field is filled from."""
    field = next((field for field in config_fields() if field.name == dest), None)
    return flag_of(field).name if field is not None else option(dest)


def stands_against(refusal: Refusal, args: Namespace, kinds: Collection[str]) -> bool:
    """Return whether a refusal is about these arguments, on a platform of these kinds."""
    if not _set(getattr(args, refusal.dest, None), refusal) or _possible(refusal, args):
        return False
    return not refusal.platforms or bool({*kinds} & {*refusal.platforms})


def default_of(dest: str) -> Any:
    """Return the value that an attribute has where its flag is not given."""
    return _defaults().get(dest)


def _set(value: Any, refusal: Refusal) -> bool:
    if refusal.values:
        given = value if isinstance(value, (list, tuple)) else [value]
        return any(item in refusal.values for item in given)
    default = _defaults().get(refusal.dest)
    return value is not None and value != default if default else bool(value)


@cache
def _defaults() -> dict[str, Any]:
    """Return the default of each option of a configuration, by the attribute of the arguments."""
    # Of classes that share a field's name the first one makes the flag.
    fields = [field for field in reversed(config_fields()) if not why_excluded(field)]
    return {
        dest_of(field.name): field.default if field.annotation == "bool" else flag_of(field).default
        for field in fields
    }


def _possible(refusal: Refusal, args: Namespace) -> bool:
    needed = refusal.without
    by_te = needed == "te" or refusal.dest == "moe_grouped_gemm"
    if by_te and args.transformer_impl == "transformer_engine":
        return True
    return bool(needed) and needed != "te" and find_spec(needed) is not None
