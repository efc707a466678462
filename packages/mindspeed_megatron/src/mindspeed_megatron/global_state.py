"""State that megatron-core keeps in module globals, and how it is reset.

A second run in one process (a test, a notebook, a reinforcement-learning loop) initialises megatron again and
must find it as it was at import. Only modules that are loaded are touched.
"""

from __future__ import annotations

import sys

_DESTROYERS = {
    "megatron.core.parallel_state": (
        "destroy_global_memory_buffer",
        "destroy_global_symmetric_memory_buffer",
        "destroy_model_parallel",
    ),
    "megatron.core.num_microbatches_calculator": ("destroy_num_microbatches_calculator",),
    "megatron.core.rerun_state_machine": ("destroy_rerun_state_machine",),
    # Its buffer keeps the group that it was made with, and serves whatever group comes next.
    "megatron.core.transformer.moe.fused_a2a": ("reset_hybrid_ep_buffer",),
    "mindspeed_megatron.output_checkpoint": ("forget_checkpoints",),
}
_STREAMS = (
    ("megatron.core.transformer.moe.token_dispatcher", "MoEAlltoAllTokenDispatcher.cuda_dtoh_stream"),
    ("megatron.core.transformer.moe.shared_experts", "SharedExpertMLP.stream"),
    ("megatron.core.extensions.transformer_engine", "TEDotProductAttention.cp_stream"),
    ("megatron.core.pipeline_parallel.fine_grained_activation_offload", "PipelineOffloadManager.OFFLOAD_MGR"),
    ("megatron.core.pipeline_parallel.utils", "_COMP_STREAM"),
    ("megatron.core.pipeline_parallel.utils", "_COMM_STREAM"),
)
"""Streams, and an object with two, that the first user creates for the process: module, name in it."""
_RANDOM = "megatron.core.tensor_parallel.random"
_MOE = "megatron.core.transformer.moe.moe_utils"
_MTP = "megatron.core.transformer.multi_token_prediction"


def destroy_megatron_state() -> None:
    """Forget process groups, buffers, microbatch calculator, rerun machine, RNG tracker, streams.

    Process groups themselves are destroyed with ``torch.distributed.destroy_process_group`` by whoever made
    them. Safe to call at any time, also when nothing was initialised.
    """
    for name, functions in _DESTROYERS.items():
        module = sys.modules.get(name)
        for function in functions:
            destroy = getattr(module, function, None)
            if destroy is not None:
                destroy()
    random = sys.modules.get(_RANDOM)
    if random is not None:
        random._CUDA_RNG_STATE_TRACKER = None  # type: ignore[attr-defined]
        random._CUDA_RNG_STATE_TRACKER_INITIALIZED = False  # type: ignore[attr-defined]
    tracker = getattr(sys.modules.get(_MOE), "_MOE_LAYER_WISE_LOGGING_TRACKER", None)
    if tracker:
        tracker.clear()
    record = getattr(sys.modules.get(_MOE), "get_moe_metrics_tracker", None)
    if record is not None:
        record().metrics.clear()
    for name, path in _STREAMS:
        kind, _, stream = path.rpartition(".")
        module = sys.modules.get(name)
        holder = getattr(module, kind, None) if kind else module
        if getattr(holder, stream, None) is not None:
            setattr(holder, stream, None)
    predictions = getattr(sys.modules.get(_MTP), "MTPLossLoggingHelper", None)
    if predictions is not None:
        predictions.tracker.clear()
