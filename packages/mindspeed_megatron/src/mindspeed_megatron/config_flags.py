"""Flags made from the fields of the installed megatron-core's configuration classes.

A field becomes a flag by Megatron-LM's rules, so that what a new megatron-core adds can be given on the
command line without a change here. The tables hold what a rule cannot know: names that Megatron-LM spells
otherwise, defaults it has otherwise, and fields that are no flag, each with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_core.feature import Flag
from mindspeed_megatron.config_fields import UNKNOWN, ConfigField, config_fields
from mindspeed_megatron.layer_patterns import layer_pattern, window

DTYPES = ("fp32", "bf16", "fp16", "fp8")

_SCALARS: dict[str, Callable[[str], Any]] = {"bool": bool, "int": int, "float": float, "str": str}
_LISTS: dict[str, Callable[[str], Any]] = {"list[int]": int, "list[str]": str, "list[float]": float}
_HEADINGS = {
    "ModelParallelConfig": "megatron-core: parallelism and precision",
    "TransformerConfig": "megatron-core: model",
    "MLATransformerConfig": "megatron-core: multi-latent attention",
    "OptimizerConfig": "megatron-core: optimizer",
    "DistributedDataParallelConfig": "megatron-core: data parallelism",
}


@dataclass(frozen=True)
class Spelling:
    """Difference between a field's flag and what the rules would make of it; None keeps the rule's choice.

    Attributes:
        name: the option string.
        dest: the attribute of the arguments.
        type: the kind of value.
        choices: the legal values.
        default: the default, `UNKNOWN` to keep the field's.
        nargs: argparse's ``nargs``.
    """

    name: str = ""
    dest: str = ""
    type: Callable[[str], Any] | None = None
    choices: tuple[Any, ...] = ()
    default: Any = UNKNOWN
    nargs: str | None = None


_PATTERN = Spelling(type=layer_pattern)

SPELLINGS: Mapping[str, Spelling] = {
    "layernorm_epsilon": Spelling("--norm-epsilon", "norm_epsilon"),
    "layernorm_zero_centered_gamma": Spelling("--apply-layernorm-1p", "apply_layernorm_1p"),
    "add_bias_linear": Spelling("--disable-bias-linear"),
    "num_moe_experts": Spelling("--num-experts", "num_experts"),
    "num_layers_in_first_pipeline_stage": Spelling(
        "--decoder-first-pipeline-num-layers", "decoder_first_pipeline_num_layers"
    ),
    "num_layers_in_last_pipeline_stage": Spelling(
        "--decoder-last-pipeline-num-layers", "decoder_last_pipeline_num_layers"
    ),
    "pipeline_model_parallel_layout": Spelling(type=str),
    "attention_backend": Spelling(
        type=str, choices=("flash", "fused", "unfused", "local", "auto"), default="auto"
    ),
    "window_size": Spelling(type=window),
    "window_attn_skip_freq": _PATTERN,
    "no_rope_freq": _PATTERN,
    "moe_layer_freq": _PATTERN,
    "linear_attention_freq": _PATTERN,
    "moe_router_load_balancing_type": Spelling(
        type=str,
        nargs="+",
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"),
        default=("aux_loss",),
    ),
    "moe_aux_loss_coeff": Spelling(type=float, nargs="+", default=(0.0,)),
    "cp_comm_type": Spelling(type=str, nargs="+", default=("p2p",)),
    "cuda_graph_scope": Spelling(type=str, nargs="+"),
    "offload_modules": Spelling(type=str, nargs="+"),
    "perform_initialization": Spelling("--no-initialization"),
    "use_te_rng_tracker": Spelling("--te-rng-tracker"),
    "overlap_p2p_comm_warmup_flush": Spelling("--overlap-p2p-communication-warmup-flush"),
    "microbatch_group_size_per_vp_stage": Spelling("--microbatch-group-size-per-virtual-pipeline-stage"),
    "barrier_with_L1_time": Spelling("--no-barrier-with-level-1-timing"),
    "use_mamba_mem_eff_path": Spelling("--disable-mamba-mem-eff-path"),
    "fp8": Spelling("--fp8-format"),
    "fp8_param": Spelling("--fp8-param-gather", "fp8_param_gather"),
    "fp4": Spelling("--fp4-format"),
    "fp4_param": Spelling("--fp4-param-gather"),
    # Data parallelism has a field of its own for it since 0.17.
    "fp4_param_gather": Spelling("--fp4-param-gather", "fp4_param"),
    "rope_type": Spelling(choices=("rope", "yarn"), default=None),
    # Megatron-LM's defaults of these three differ from megatron-core's.
    "q_lora_rank": Spelling(default=None),
    "kv_lora_rank": Spelling(default=32),
    "rotary_scaling_factor": Spelling(default=1.0),
    # megatron-core 0.15 has none and divides it by the number of predictions.
    "mtp_loss_scaling_factor": Spelling(default=0.1),
    "average_in_collective": Spelling("--ddp-average-in-collective", "ddp_average_in_collective"),
    "pad_buckets_for_high_nccl_busbw": Spelling(
        "--ddp-pad-buckets-for-high-nccl-busbw", "ddp_pad_buckets_for_high_nccl_busbw"
    ),
    "reduce_scatter_with_fp32_accumulation": Spelling(
        "--ddp-reduce-scatter-with-fp32-accumulation", "ddp_reduce_scatter_with_fp32_accumulation"
    ),
    "muon_split_qkv": Spelling("--muon-no-split-qkv"),
    "main_grads_dtype": Spelling(type=str, choices=("fp32", "bf16"), default="fp32"),
    "main_params_dtype": Spelling(type=str, choices=("fp32", "fp16"), default="fp32"),
    "exp_avg_dtype": Spelling(type=str, choices=DTYPES, default="fp32"),
    "exp_avg_sq_dtype": Spelling(type=str, choices=DTYPES, default="fp32"),
}
"""Fields whose flag Megatron-LM spells otherwise, or whose annotation no rule covers."""

_NO_FLAG = {
    "the host derives it from other flags": (
        "virtual_pipeline_model_parallel_size params_dtype pipeline_dtype autocast_dtype batch_p2p_comm "
        "overlap_p2p_comm deallocate_pipeline_outputs mtp_standalone is_hybrid_model "
        "grad_reduce_in_fp32 check_for_nan_in_grad bucket_size align_param_gather decoupled_weight_decay "
        "quant_recipe inference_sampling_seed"
    ),
    "given as --ddp-num-buckets": "num_buckets",
    "chosen with --swiglu, --squared-relu or --quick-geglu": (
        "gated_linear_unit activation_func bias_activation_fusion"
    ),
    "local layers have no such kernel; Megatron-LM's --no-... flags are accepted": (
        "gradient_accumulation_fusion masked_softmax_fusion persist_layer_norm bias_dropout_fusion "
        "apply_rope_fusion"
    ),
    "an option of Megatron-FSDP, whose flags are written by hand": (
        "use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy outer_dp_sharding_strategy "
        "suggested_communication_unit_size preserve_fp32_weights keep_fp8_transpose_cache nccl_ub "
        "fsdp_double_buffer disable_symmetric_registration fsdp_manual_registration "
        "init_model_with_meta_device fsdp_db_use_persist_buf_on_alloc_fail "
        "fsdp_all_gather_in_start_param_sync megatron_fsdp_main_params_dtype megatron_fsdp_main_grads_dtype "
        "megatron_fsdp_grad_comm_dtype megatron_fsdp_use_decoupled_grad megatron_fsdp_cuda_graph_mode "
        "megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_max_pool_double_buffer"
    ),
    "an option of megatron-core's inference engines": (
        "flash_decode inference_rng_tracker use_inference_optimized_layers "
        "inference_fuse_tp_communication mlp_chunks_for_prefill cache_mla_latents symmetric_ar_type "
        "nccl_all_reduce_for_prefill inference_disable_triton_nvls_kernels inference_grouped_gemm_backend "
        "inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type "
        "inference_cuda_graph_scope moe_pad_experts_for_cuda_graph_inference"
    ),
    "spreads weights over ranks of groups of their own, which no host here builds": (
        "tensor_parallel_num_weight_shards gtp_weight_remat_size expert_tensor_parallel_num_weight_shards "
        "expert_gtp_weight_remat_size"
    ),
    "asks for another optimizer than those that hosts here build": (
        "use_layer_wise_distributed_optimizer optimizer_cuda_graph grad_norm_skip_threshold "
        "muon_coefficient_type muon_scalar_optimizer muon_nesterov lion_beta1 lion_beta2 soap_shampoo_beta "
        "soap_precondition_frequency soap_use_kl_shampoo adaptive_muon_moment2_method adaptive_muon_beta2 "
        "adaptive_muon_eps"
    ),
    "needs learning rates that depend on the width of a weight, which hosts here do not set": (
        "use_mup mup_width_mult mup_base_hidden_size mup_embedding_mult mup_output_mult mup_base_head_dim "
        "mup_attn_scale_power"
    ),
    "asks norms for the residual too, which those of features do not return": "fused_residual_rmsnorm",
    "no value that one could type": (
        "moe_grad_scale_func mtp_grad_scale_func experimental_attention_variant_loss_scale_func "
        "cuda_graph_modules mamba_training_ssm_states_dtype param_name_patterns_for_fp32_local_accumulation"
    ),
    "clips gradients of prediction layers by a norm of their own, which optimizers of features do not": (
        "mtp_detach_heads"
    ),
    "changes the stages that a prediction layer is made of, which features go through": (
        "mtp_hybrid_override_pattern"
    ),
    "deprecated in megatron-core, and no flag of Megatron-LM": (
        "moe_extended_tp async_tensor_model_parallel_allreduce tp_comm_split_ag tp_comm_split_rs "
        "tp_comm_atomic_ag tp_comm_atomic_rs moe_token_dropping moe_router_topk_limited_devices "
        "cuda_graph_use_single_mempool cuda_graph_retain_backward_graph use_ring_exchange_p2p"
    ),
    "set by megatron-core's heterogeneous configuration class, which this host does not build": (
        "heterogeneous_block_specs hetereogenous_dist_checkpoint"
    ),
}
EXCLUDED: Mapping[str, str] = {name: reason for reason, names in _NO_FLAG.items() for name in names.split()}
"""Fields that are no flag, with the reason."""


def generated_flags(written: Iterable[Flag]) -> tuple[Flag, ...]:
    """Return the flags of the fields that no flag in ``written`` covers, by option or by attribute."""
    options = {option for flag in written for option in flag.options}
    dests = {flag.dest for flag in written}
    made: list[Flag] = []
    for field in config_fields():
        flag = None if why_excluded(field) else flag_of(field)
        if flag is None or flag.dest in dests or field.name in dests or options & set(flag.options):
            continue
        made.append(flag)
        dests.add(flag.dest)
        options.update(flag.options)
    return tuple(made)


def why_excluded(field: ConfigField) -> str:
    """Say why a field is no flag; nothing for a flag."""
    if field.name in EXCLUDED:
        return EXCLUDED[field.name]
    if field.name.startswith("_"):
        return "private"
    if field.name not in SPELLINGS and _kind(field) is None:
        return f"nothing one could type: {field.annotation}"
    return ""


def flag_of(field: ConfigField) -> Flag:
    """Make the flag of a field: Megatron-LM's spelling, or ``--field-name``; ``--no-...`` where it is on."""
    spelling = SPELLINGS.get(field.name, Spelling())
    rule, nargs = _kind(field) or (str, None)
    kind = spelling.type or rule
    dest = spelling.dest or field.name
    dashed = field.name.replace("_", "-")
    default = field.default if spelling.default is UNKNOWN else spelling.default
    inverted = kind is bool and default is True
    given = (spelling.name,) if spelling.name else field.options
    if not given:
        given = (f"--no-{dashed}", f"--disable-{dashed}") if inverted else (f"--{dashed}",)
    text = (field.summary or f"megatron-core's {field.owner}.{field.name}") + "."
    names: dict[str, Any] = {"name": given[0], "aliases": given[1:], "group": _HEADINGS[field.owner]}
    if inverted:
        return Flag(**names, inverts=dest, help=f"Off: {text}")
    if kind is bool:
        return Flag(**names, dest=dest, help=text)
    if isinstance(default, tuple):
        default = list(default)
    return Flag(
        **names,
        type=kind,
        dest=dest,
        default=None if default is UNKNOWN else _of_kind(kind, default),
        choices=spelling.choices or field.choices,
        nargs=spelling.nargs or nargs,
        help=text,
    )


def dest_of(name: str) -> str:
    """Return the attribute of the arguments that a configuration field is filled from."""
    spelling = SPELLINGS.get(name)
    return spelling.dest or name if spelling is not None else name


def _kind(field: ConfigField) -> tuple[Callable[[str], Any], str | None] | None:
    if field.annotation in _SCALARS:
        return _SCALARS[field.annotation], None
    if field.annotation in _LISTS:
        return _LISTS[field.annotation], "+"
    return None


def _of_kind(kind: Callable[[str], Any], default: Any) -> Any:
    return float(default) if kind is float and isinstance(default, int) else default
