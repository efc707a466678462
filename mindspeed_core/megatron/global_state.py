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
}
_STREAMS = {
    "megatron.core.transformer.moe.token_dispatcher": ("MoEAlltoAllTokenDispatcher", "cuda_dtoh_stream"),
    "megatron.core.transformer.moe.shared_experts": ("SharedExpertMLP", "stream"),
}
"""Streams that classes create for the process with the first of their instances: module, class, attribute."""
_RANDOM = "megatron.core.tensor_parallel.random"
_MOE = "megatron.core.transformer.moe.moe_utils"
_MTP = "megatron.core.transformer.multi_token_prediction"


def destroy_megatron_state() -> None:
    """Forget process groups, buffers, microbatch calculator, rerun machine, RNG tracker, expert streams.

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
    for name, (kind, stream) in _STREAMS.items():
        holder = getattr(sys.modules.get(name), kind, None)
        if holder is not None:
            setattr(holder, stream, None)
    predictions = getattr(sys.modules.get(_MTP), "MTPLossLoggingHelper", None)
    if predictions is not None:
        predictions.tracker.clear()
