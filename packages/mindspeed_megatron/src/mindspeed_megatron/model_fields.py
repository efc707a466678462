"""The fields of a model, and what it means for its checkpoint that one of them differs: one table.

A checkpoint holds tensors; which function they are the weights of, only the configuration says. A field that
changes this function must be the same when the tensors are loaded. One that changes how the function is
trained may differ, and is worth a line; one that changes where or how fast it is computed needs none.
A field that is in no row, of a later megatron-core or of a configuration class of somebody's own, counts as
changing the function. Data only: no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

Fields = Mapping[str, Any]


class Verdict(Enum):
    """Consequence of a difference in a field for a checkpoint."""

    FUNCTION = "the model computes something else"
    TRAINING = "it is trained otherwise"
    SILENT = "the same model, trained the same way"


@dataclass(frozen=True)
class Rule:
    """One row.

    Attributes:
        verdict: what a difference means.
        reason: why, as the documentation prints it.
        names: fields of megatron-core's configuration classes, and arguments that are none.
        matters: whether the fields are used in a model with these fields; always where it is left out.
        otherwise: what a difference means where they are not.
        notice: what a user should know when they differ; for rows of `Verdict.TRAINING`.
    """

    verdict: Verdict
    reason: str
    names: tuple[str, ...]
    matters: Callable[[Fields], bool] = lambda fields: True
    otherwise: Verdict = Verdict.SILENT
    notice: str = ""


def _row(
    verdict: Verdict,
    reason: str,
    names: str,
    matters: Callable[[Fields], bool] = lambda fields: True,
    **facts: Any,
) -> Rule:
    return Rule(verdict, reason, tuple(names.split()), matters, **facts)


def _set(name: str) -> Callable[[Fields], bool]:
    return lambda fields: bool(fields.get(name))


def _rotates(fields: Fields) -> bool:
    return bool(fields.get("multi_latent_attention")) or fields.get("position_embedding_type") not in (
        "learned_absolute",
        "none",
    )


def _scales_rope(fields: Fields) -> bool:
    return _rotates(fields) and bool(fields.get("use_rope_scaling"))


def _has_capacity(fields: Fields) -> bool:
    return bool(fields.get("num_moe_experts")) and fields.get("moe_expert_capacity_factor") is not None


def _sinkhorn(fields: Fields) -> bool:
    kinds = fields.get("moe_router_load_balancing_type")
    return bool(fields.get("num_moe_experts")) and "sinkhorn" in (
        kinds if isinstance(kinds, (list, tuple)) else [kinds]
    )


_EXPERTS, _LATENT = _set("num_moe_experts"), _set("multi_latent_attention")
_FUNCTION, _TRAINING, _SILENT = Verdict.FUNCTION, Verdict.TRAINING, Verdict.SILENT
_PLACE = (
    "the place in the data is counted in samples, which are other ones now: training goes on at the same "
    "number, with other text"
)

RULES: tuple[Rule, ...] = (
    _row(
        _FUNCTION,
        "layers, their width and their heads",
        "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels "
        "share_embeddings_and_output_weights",
    ),
    _row(
        _FUNCTION,
        "what a layer is made of",
        "normalization layernorm_epsilon layernorm_zero_centered_gamma add_bias_linear add_qkv_bias "
        "qk_layernorm qk_l2_norm gated_linear_unit activation_func activation_func_clamp_value "
        "glu_linear_offset apply_residual_connection_post_layernorm attention_output_gate "
        "multi_latent_attention experimental_attention_variant heterogeneous_block_specs "
        "heterogeneous_layers_config_encoded_json per_block_parameters is_hybrid_model",
    ),
    _row(
        _FUNCTION,
        "what attention sees and how it weighs it",
        "softmax_scale softmax_type window_size",
    ),
    _row(_FUNCTION, "which layers have the window", "window_attn_skip_freq", _set("window_size")),
    _row(_FUNCTION, "how positions enter", "position_embedding_type mrope_section"),
    _row(
        _FUNCTION,
        "rotary positions",
        "rotary_base rotary_percent rotary_interleaved rotary_seq_len_interpolation_factor "
        "use_rope_scaling no_rope_freq rotary_frequencies",
        _rotates,
    ),
    _row(_FUNCTION, "rotary positions", "rope_scaling_factor", _scales_rope),
    _row(
        _FUNCTION,
        "multi-latent attention and its rotary positions",
        "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type "
        "rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim",
        _LATENT,
    ),
    _row(
        _FUNCTION,
        "sparse attention",
        "dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk",
        _set("experimental_attention_variant"),
    ),
    _row(
        _FUNCTION,
        "which tokens sparse attention chooses",
        "dsa_indexer_topk_freq dsa_indexer_skip_topk_offset dsa_indexer_rope_interleaved "
        "dsa_indexer_rotate_activation dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon "
        "dsa_indexer_k_norm_fp32",
        _set("experimental_attention_variant"),
    ),
    _row(_FUNCTION, "which layers attend linearly", "linear_attention_freq"),
    _row(
        _FUNCTION,
        "linear attention",
        "linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads "
        "linear_num_value_heads",
        lambda fields: bool(
            fields.get("linear_attention_freq") or fields.get("experimental_attention_variant")
        ),
    ),
    _row(
        _FUNCTION,
        "Mamba layers",
        "mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads",
        _set("is_hybrid_model"),
    ),
    _row(
        _FUNCTION,
        "factors of maximal update parametrization",
        "mup_width_mult mup_base_hidden_size mup_embedding_mult mup_output_mult mup_base_head_dim "
        "mup_attn_scale_power",
        _set("use_mup"),
    ),
    _row(_FUNCTION, "outputs are scaled by the width of the model", "use_mup"),
    _row(
        _FUNCTION,
        "layers that predict tokens further on",
        "mtp_use_repeated_layer mtp_hybrid_override_pattern",
        _set("mtp_num_layers"),
    ),
    _row(
        _FUNCTION,
        "the order of the rows or the parts of weights",
        "mla_down_proj_fusion moe_single_grouped_weight moe_single_grouped_bias moe_mlp_glu_interleave_size "
        "moe_shared_expert_glu_interleave_size",
    ),
    _row(_FUNCTION, "experts", "num_moe_experts"),
    _row(
        _FUNCTION,
        "experts, and who goes to which of them with what weight",
        "moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate "
        "moe_latent_size moe_router_topk moe_router_topk_limited_devices moe_router_num_groups "
        "moe_router_group_topk moe_router_pre_softmax moe_router_topk_scaling_factor "
        "moe_router_score_function moe_router_enable_expert_bias moe_router_force_load_balancing "
        "moe_apply_probs_on_input moe_token_dropping moe_expert_capacity_factor "
        "moe_expert_rank_capacity_factor moe_router_force_biased moe_router_quantile_balancing_ema",
        _EXPERTS,
    ),
    _row(_FUNCTION, "which tokens an expert drops", "moe_token_drop_policy", _has_capacity),
    _row(
        _FUNCTION,
        "sinkhorn is a way to choose experts; the other kinds are losses",
        "moe_router_load_balancing_type",
        _sinkhorn,
        otherwise=_TRAINING,
    ),
    _row(
        _TRAINING,
        "losses of experts, and noise",
        "moe_aux_loss_coeff moe_z_loss_coeff moe_input_jitter_eps moe_router_bias_update_rate",
        _EXPERTS,
    ),
    _row(
        _TRAINING,
        "further losses; the layers that predict tokens further on are tensors of their own",
        "mtp_num_layers dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss",
    ),
    _row(_TRAINING, "further losses", "mtp_loss_scaling_factor mtp_detach_heads", _set("mtp_num_layers")),
    _row(
        _TRAINING,
        "what a step does with the same data",
        "hidden_dropout attention_dropout calculate_per_token_loss qk_clip clip_grad lr_warmup_init "
        "lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples reset_position_ids "
        "reset_attention_mask eod_mask_loss",
    ),
    _row(
        _TRAINING,
        "how attention scores are kept small",
        "qk_clip_alpha qk_clip_threshold",
        _set("qk_clip"),
    ),
    _row(
        _TRAINING,
        "which samples there are, and in which order",
        "seq_length seed split",
        notice=_PLACE,
    ),
    _row(
        _TRAINING,
        "the precision in which the same function is computed",
        "fp16 bf16 fp8 fp4 attention_softmax_in_fp32 fp32_residual_connection apply_query_key_layer_scaling "
        "fp16_lm_cross_entropy moe_router_dtype quant_recipe",
    ),
    _row(
        _TRAINING,
        "the precision of 8-bit and 4-bit arithmetic",
        "fp8_recipe fp8_param fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad "
        "fp8_dot_product_attention fp8_output_proj fp8_multi_head_attention tp_only_amax_red "
        "first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 fp4_recipe fp4_param "
        "fp8_quantizer_factory fp4_quantizer_factory",
        lambda fields: bool(fields.get("fp8") or fields.get("fp4")),
    ),
    _row(
        _SILENT,
        "initial weights, which are loaded instead",
        "init_method output_layer_init_method init_method_std embedding_init_method "
        "embedding_init_method_std perform_initialization use_cpu_initialization init_model_with_meta_device "
        "init_method_xavier_uniform",
    ),
    _row(
        _SILENT,
        "follows from other fields, or is compared with the shape of the tensors",
        "params_dtype autocast_dtype enable_autocast pipeline_dtype max_position_embeddings "
        "vocab_size padded_vocab_size softmax_vocab_size make_vocab_size_divisible_by "
        "heterogeneous_layers_config_path",
    ),
    _row(
        _SILENT,
        "the layout: which rank holds and computes what",
        "tensor_model_parallel_size pipeline_model_parallel_size pipeline_model_parallel_comm_backend "
        "virtual_pipeline_model_parallel_size sequence_parallel context_parallel_size "
        "hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank hybrid_context_parallel "
        "expert_model_parallel_size expert_tensor_parallel_size moe_extended_tp mtp_standalone cp_comm_type "
        "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage pipeline_model_parallel_layout "
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split "
        "microbatch_group_size_per_vp_stage moe_token_dispatcher_type moe_flex_dispatcher_backend "
        "moe_enable_deepep hetereogenous_dist_checkpoint variable_seq_lengths "
        "tensor_parallel_num_weight_shards gtp_weight_remat_size expert_tensor_parallel_num_weight_shards "
        "expert_gtp_weight_remat_size",
    ),
    _row(
        _SILENT,
        "functions of a training loop",
        "timers finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func "
        "config_logger_dir log_max_attention_logit moe_per_layer_logging barrier_with_L1_time test_mode "
        "moe_enable_routing_replay moe_grad_scale_func mtp_grad_scale_func "
        "experimental_attention_variant_loss_scale_func",
    ),
    _row(
        _SILENT,
        "what is kept for backward, recomputed or moved to the host",
        "num_microbatches_with_partial_activation_checkpoints recompute_granularity recompute_method "
        "recompute_num_layers recompute_modules recompute_activations distribute_saved_activations "
        "moe_layer_recompute cpu_offloading cpu_offloading_num_layers _cpu_offloading_context "
        "cpu_offloading_activations cpu_offloading_weights cpu_offloading_double_buffering "
        "fine_grained_activation_offloading offload_modules min_offloaded_tensor_size "
        "deallocate_pipeline_outputs activation_func_fp8_input_store clone_scatter_output_in_embedding "
        "disable_parameter_transpose_cache memory_efficient_layer_norm "
        "ep_overlap_early_attn_memory_release cpu_offloading_retain_pinned_cpu_buffers "
        "mlp_chunks_for_training delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks "
        "activation_offload_fraction fine_grained_offloading_max_inflight_offloads moe_paged_stash "
        "moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda "
        "moe_paged_stash_buffer_size_factor_cpu mamba_training_ssm_states_dtype",
    ),
    _row(
        _SILENT,
        "a kernel for the same arithmetic",
        "transformer_impl attention_backend deterministic_mode batch_invariant_mode "
        "gradient_accumulation_fusion bias_activation_fusion bias_gelu_fusion bias_swiglu_fusion "
        "bias_dropout_fusion masked_softmax_fusion "
        "persist_layer_norm apply_rope_fusion fused_single_qkv_rope use_fused_weighted_squared_relu "
        "use_te_activation_func cross_entropy_loss_fusion cross_entropy_fusion_impl moe_grouped_gemm "
        "moe_use_legacy_grouped_gemm moe_permute_fusion moe_router_fusion moe_pad_expert_input_to_capacity "
        "moe_router_padding_for_fp8 moe_router_padding_for_quantization use_mamba_mem_eff_path "
        "use_kitchen use_kitchen_attention kitchen_attention_backend disable_bf16_reduced_precision_matmul "
        "use_te_rng_tracker no_masked_softmax_fusion no_rope_fusion no_persist_layer_norm "
        "no_gradient_accumulation_fusion flash_attention_version dsa_kernel_backend "
        "fused_residual_rmsnorm use_transformer_engine_op_fuser use_grouped_gemm_for_dense_mlp "
        "use_grouped_gemm_for_shared_expert moe_permute_fusion_into_hybridep",
    ),
    _row(
        _SILENT,
        "when something is sent or computed",
        "async_tensor_model_parallel_allreduce tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad "
        "tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag "
        "tp_comm_split_rs tp_comm_atomic_rs tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 "
        "tp_comm_bootstrap_backend overlap_moe_expert_parallel_comm delay_wgrad_compute overlap_p2p_comm "
        "batch_p2p_comm batch_p2p_sync use_ring_exchange_p2p defer_embedding_wgrad_compute "
        "wgrad_deferral_limit overlap_p2p_comm_warmup_flush moe_shared_expert_overlap moe_deepep_num_sms "
        "moe_hybridep_num_sms enable_cuda_graph cuda_graph_use_single_mempool "
        "cuda_graph_retain_backward_graph cuda_graph_warmup_steps external_cuda_graph cuda_graph_impl "
        "cuda_graph_scope cuda_graph_modules overlap_dispatch_backward_with_experts_wgrad "
        "high_priority_a2a_comm_stream moe_flex_dispatcher_num_sms moe_hybridep_num_blocks_permute "
        "moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms_preprocessing "
        "moe_hybridep_pad_uneven_dispatch_inputs moe_ncclep_static_shape moe_ncclep_zero_copy",
    ),
    _row(
        _SILENT,
        "an option of megatron-core's inference engines",
        "flash_decode inference_rng_tracker inference_sampling_seed symmetric_ar_type "
        "mlp_chunks_for_prefill use_inference_optimized_layers inference_fuse_tp_communication "
        "cache_mla_latents nccl_all_reduce_for_prefill inference_disable_triton_nvls_kernels "
        "inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels "
        "inference_moe_token_dispatcher_type inference_cuda_graph_scope "
        "moe_pad_experts_for_cuda_graph_inference",
    ),
)

ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "swiglu": ("gated_linear_unit", "activation_func"),
    "squared_relu": ("activation_func",),
    "quick_geglu": ("gated_linear_unit", "activation_func"),
    "group_query_attention": ("num_query_groups",),
    "untie_embeddings_and_output_weights": ("share_embeddings_and_output_weights",),
    "use_rotary_position_embeddings": ("position_embedding_type",),
    "hybrid_override_pattern": ("is_hybrid_model",),
    "moe_use_upcycling": ("num_moe_experts",),
}
"""Arguments of the command line that stand for other fields; all others are named as their field."""

_RULE_OF: Mapping[str, Rule] = {name: rule for rule in RULES for name in rule.names}
_UNKNOWN = Rule(Verdict.FUNCTION, "it is not known what this field changes", ())


def rule_of(name: str) -> Rule:
    """Return the row of a field; one that is in none changes the function."""
    return _RULE_OF.get(name, _UNKNOWN)


def is_known(name: str) -> bool:
    """Return whether a field is in the table."""
    return name in _RULE_OF


def verdict_of(name: str, *models: Fields) -> Verdict:
    """Return what a difference in a field means between models with these fields."""
    rule = rule_of(name)
    return rule.verdict if any(rule.matters(fields) for fields in models) else rule.otherwise
