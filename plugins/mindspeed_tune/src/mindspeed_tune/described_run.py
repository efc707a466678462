"""Facts of a training run that a record names: layout, sizes, switches, and features that are not counted."""

from __future__ import annotations

from typing import Any

from mindspeed_tune.layout import ORDER, Layout

_SIZES = (
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
    "hidden_size",
    "num_attention_heads",
    "moe_router_topk",
    "num_moe_experts",
    "pre_tockens",
    "cp_window_size",
    "context_parallel_cache_interval",
)
_FLAGS = (
    "sequence_parallel",
    "use_distributed_optimizer",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "recompute_granularity",
    "num_experts",
    "multi_latent_attention",
    "moe_token_dispatcher_type",
    "moe_router_dtype",
    "context_parallel_algo",
    "cp_grad_comm_dtype",
    "cp_fetch_head_groups",
    "cp_layout",
    "cp_chunks_per_rank",
    "context_parallel_kv_cache_policy",
    "ulysses_degree_in_cp",
    "use_cp_send_recv_overlap",
    "use_ulysses_allgather_kv",
    "attention_mask_type",
    "sparse_mode",
    "reset_attention_mask",
    "use_flash_attn",
    "use_fusion_attn_v2",
    "batch_p2p_comm",
    "cross_entropy_loss_fusion",
    "untie_embeddings_and_output_weights",
)


def layout_of(run: Any) -> Layout:
    """Return the layout of the world that a run is in."""
    from megatron.core import parallel_state as state

    swapped = getattr(run.args, "use_tp_pp_dp_mapping", False)
    return Layout(
        world_size=run.dist.world_size,
        tp=state.get_tensor_model_parallel_world_size(),
        cp=state.get_context_parallel_world_size(),
        pp=state.get_pipeline_model_parallel_world_size(),
        ep=state.get_expert_model_parallel_world_size(),
        etp=state.get_expert_tensor_parallel_world_size(),
        vpp=len(run.model),
        order="tp-cp-ep-pp-dp" if swapped else ORDER,
    )


def group_size(config: Any) -> int | None:
    """Return the micro-batches that an interleaved chunk runs in a row; None without interleaving."""
    if not getattr(config, "virtual_pipeline_model_parallel_size", None):
        return None
    return getattr(config, "microbatch_group_size_per_vp_stage", None)


def sizes(run: Any) -> dict[str, float]:
    """Return the numbers of a run that closed forms use."""
    args, config = run.args, run.config
    found: dict[str, float] = {}
    for name in _SIZES:
        value = getattr(args, name, None)
        value = getattr(config, name, None) if value is None else value
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found[name] = value
    size = group_size(config)
    if size:
        found["microbatch_group_size"] = size
    for name, buffers in (("dense", "buffers"), ("expert", "expert_parallel_buffers")):
        held = [buffer for chunk in run.model for buffer in _buffers(chunk, buffers)]
        found[f"{name}_elements"] = sum(buffer.numel for buffer in held)
        found[f"{name}_buckets"] = sum(len(buffer.buckets) for buffer in held)
    # The flags leave open what the configuration has decided.
    if getattr(config, "multi_latent_attention", False):
        found["key_heads"] = config.num_attention_heads
        found["key_channels"] = config.qk_head_dim + config.qk_pos_emb_head_dim
        found["value_channels"] = config.v_head_dim
    else:
        found["key_heads"] = config.num_query_groups or config.num_attention_heads
        found["key_channels"] = found["value_channels"] = config.kv_channels
    # Without overlap each of them brings the parameters of all others back too.
    found["optimizers"] = len(getattr(run.optimizer, "chained_optimizers", ())) or 1
    found["moe_layers"] = sum(
        type(module).__name__ == "MoELayer" for chunk in run.model for module in chunk.modules()
    )
    found["model_flops"] = _model_flops(run)
    return found


def flags(run: Any) -> dict[str, Any]:
    """Return the switches of a run that closed forms and advice ask about."""
    args, config = run.args, run.config
    found = {name: _either(args, config, name) for name in _FLAGS}
    found["params_dtype"] = str(config.params_dtype).removeprefix("torch.")
    found["moe_capacity"] = getattr(config, "moe_expert_capacity_factor", None)
    held = [buffer for chunk in run.model for buffer in _buffers(chunk, "buffers")]
    found["distributed_data_parallel"] = bool(held)
    if held:
        found["gradient_dtype"] = str(held[0].grad_dtype).removeprefix("torch.")
    return found


def incomplete(session: Any) -> dict[str, str]:
    """Return the active features that do not state that they work without values."""
    found = {}
    for name in session.plan.names:
        record = session.registry.features.get(name)
        if record is None or record.cls.fake_tensors is not True:
            found[name] = "does not state that it works on tensors without values (fake_tensors)"
    return found


def _either(args: Any, config: Any, name: str) -> Any:
    value = getattr(args, name, None)
    value = getattr(config, name, None) if value is None else value
    return value if isinstance(value, (bool, int, float, str)) else None


def _buffers(chunk: Any, name: str) -> list[Any]:
    # torch's own Module.buffers is a method: a chunk without data parallelism has no list of that name.
    found = getattr(chunk, name, None)
    return found if isinstance(found, list) else []


def _model_flops(run: Any) -> float:
    """Return the operations of the model in a step; 0 where nobody counts them."""
    from mindspeed_megatron.flops import count_run, uncounted

    args = run.args
    vocabulary = getattr(args, "padded_vocab_size", None)
    length, batch = getattr(args, "seq_length", None), getattr(args, "global_batch_size", None)
    if uncounted(run.config) or not (vocabulary and length and batch):
        return 0.0
    return count_run(run, length, vocabulary).model * batch
