"""Methods of megatron-core that sources call on objects whose class no import and no annotation names.

``run.optimizer.reload_model_params()`` says nothing of a class. A name stands here where our sources call it
and nothing but classes of megatron-core defines it; names that torch, a tokenizer or a class of ours has too
cannot be told apart by reading, and are left out.
"""

from __future__ import annotations

from collections.abc import Mapping

_DDP = "distributed.distributed_data_parallel.DistributedDataParallel"
_BUCKETS = "distributed.param_and_grad_buffer._ParamAndGradBucketGroup"
_FSDP = "distributed.fsdp.src.megatron_fsdp.megatron_fsdp.MegatronFSDP"
_OPTIMIZERS = tuple(f"optimizer.optimizer.{name}" for name in ("MegatronOptimizer", "ChainedOptimizer"))
_SHARDED = "optimizer.distrib_optimizer.DistributedOptimizer"
_DISPATCHERS = tuple(
    f"transformer.moe.token_dispatcher.MoE{name}TokenDispatcher" for name in ("AllGather", "AlltoAll")
)
_ROUTER = "transformer.moe.router.TopKRouter"
_GENERATORS = "tensor_parallel.random.CudaRNGStatesTracker"
_CONTEXTS = "inference.contexts"
_OF_CLASSES: Mapping[tuple[str, ...], str] = {
    (_DDP,): "broadcast_params start_grad_sync zero_grad_buffer",
    (_BUCKETS,): "finish_param_sync register_grad_ready",
    (_FSDP,): "_replace_param_with_distributed_if_needed _replace_param_with_raw_if_needed "
    "install_optimized_model_weights synchronize_param_gather",
    _OPTIMIZERS: "get_grad_stats_parallel_group get_loss_scale reload_model_params",
    (_OPTIMIZERS[1],): "grads_states_parallel_group_is_shared",
    (_SHARDED,): "_build_model_param_to_state_dict_param_map _get_main_param_and_optimizer_states "
    "_get_model_param_range_map split_state_dict_if_needed",
    _DISPATCHERS: "combine_preprocess dispatch_postprocess",
    (_DISPATCHERS[1],): "_maybe_dtoh_and_synchronize",
    (_ROUTER,): "attach_and_log_load_balancing_loss get_aux_loss_coeff",
    ("transformer.moe.moe_layer.MoELayer",): "shared_experts_compute",
    ("transformer.moe.shared_experts.SharedExpertMLP",): "linear_fc1_forward_and_act",
    ("transformer.pipeline_parallel_layer_layout.PipelineParallelLayerLayout",): "get_layer_id_list",
    ("parallel_state.RankGenerator",): "get_mask",
    (_GENERATORS,): "get_states set_states",
    ("models.gpt.gpt_model.GPTModel",): "set_input_tensor shared_embedding_or_output_weight",
    (f"{_CONTEXTS}.base_context.BaseInferenceContext",): "increment_sequence_len_offset is_static_batching",
    (f"{_CONTEXTS}.static_context.StaticInferenceContext",): "enable_decode_mode",
    (
        "datasets.blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder",
    ): "_build_megatron_dataset_splits",
    ("timers.Timer",): "elapsed",
}
METHODS: Mapping[str, tuple[str, ...]] = {
    name: tuple(f"megatron.core.{one}.{name}" for one in classes)
    for classes, names in _OF_CLASSES.items()
    for name in names.split()
}
"""Dotted names of the methods that a call of an unknown object may mean, by the name that is called."""
