"""Patches that let the CPU answer megatron-core's calls of ``torch.cuda``.

megatron-core names cuda in its source. While a session is open on the cpu platform, ``torch.cuda`` functions,
tensor factories and a few tensor methods are patched so that those calls work without a device; each patch is
in the session's ledger and gone when it closes. ``torch.cuda.is_available()`` stays False, so that libraries
which ask do the right thing.
"""

from __future__ import annotations

import sys

from mindspeed_core.errors import SessionError
from mindspeed_core.feature import Patch
from mindspeed_megatron.devices.without_te import patches_without_te

_FACTORIES = (
    "empty zeros ones full tensor as_tensor asarray arange range linspace logspace eye rand randn randint "
    "randperm normal empty_strided empty_permuted scalar_tensor tril_indices triu_indices empty_like "
    "zeros_like ones_like full_like rand_like randn_like randint_like"
)
_TENSOR_FACTORIES = "new_empty new_zeros new_ones new_full new_tensor new_empty_strided"
_CALLS = {
    "torch.cuda": (
        "is_available device_count current_device set_device synchronize _lazy_init _lazy_call "
        "current_stream default_stream stream set_stream utilization temperature power_draw clock_rate"
    ),
    "torch.cuda.graphs": "is_current_stream_capturing",
    "torch.cuda.nvtx": "range_push range_pop mark",
    "torch.cuda.random": (
        "get_rng_state get_rng_state_all set_rng_state set_rng_state_all manual_seed manual_seed_all "
        "initial_seed"
    ),
    "torch.cuda.memory": (
        "memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_stats mem_get_info "
        "reset_peak_memory_stats reset_max_memory_allocated empty_cache set_per_process_memory_fraction"
    ),
}
_OTHER_CALLS = {
    "torch.cuda:default_generators": "GENERATORS",
    "torch.cuda:device.__enter__": "enter_device",
    "torch.cuda:device.__exit__": "exit_device",
    "torch.cuda.streams:Stream.__new__": "new_stream",
    "torch.cuda.streams:ExternalStream.__new__": "new_external_stream",
    "torch.cuda.streams:Event.__new__": "new_event",
    "torch.cuda.nvtx:range": "nvtx_range",
    "torch:Tensor.cuda": "tensor_cuda",
    "torch:Tensor.pin_memory": "tensor_pin_memory",
    "torch:Tensor.record_stream": "tensor_record_stream",
    "torch.nn:Module.cuda": "module_cuda",
}
_WRAPPED = {
    "torch:Tensor.to": "tensor_to",
    "torch:Tensor.type": "tensor_type",
    "torch:load": "load",
    "torch.utils._device:DeviceContext.__init__": "device_context",
    "torch.amp.autocast_mode:autocast.__init__": "autocast_init",
    "torch.distributed.device_mesh:DeviceMesh.from_group": "mesh_of_group",
    "torch:is_autocast_enabled": "autocast_query",
    "torch:get_autocast_dtype": "autocast_query",
}


def patches_of_cpu() -> tuple[Patch, ...]:
    """Return the emulation of ``torch.cuda``, and what megatron-core needs without TransformerEngine.

    Raises:
        SessionError: this process already uses a device whose tensors the emulation would redirect.
    """
    _refuse_mixed_process()
    _fill_caches_of_torch()
    return (*_PATCHES, *patches_without_te())


def _refuse_mixed_process() -> None:
    way_out = "; choose --platform {} or start a fresh process"
    if "torch_npu" in sys.modules:
        raise SessionError(
            "platform cpu: torch_npu is imported in this process, the emulation would redirect its tensors"
            + way_out.format("npu")
            + " with TORCH_DEVICE_BACKEND_AUTOLOAD=0 in its environment"
        )
    import torch

    if torch.cuda.is_initialized():
        raise SessionError(
            "platform cpu: CUDA is in use in this process, the emulation would redirect CUDA tensors"
            + way_out.format("cuda")
        )


def _fill_caches_of_torch() -> None:
    """Let torch build its tables of functions by identity now: built later, they would keep patched ones."""
    from torch.utils._device import _device_constructors

    _device_constructors()


def _cpu_patches() -> tuple[Patch, ...]:
    calls = "mindspeed_megatron.devices.cuda_calls:"
    arguments = "mindspeed_megatron.devices.device_arguments:"
    emulated = {f"{module}:{name}": name for module, names in _CALLS.items() for name in names.split()}
    wrapped = {f"torch:{name}": "factory" for name in _FACTORIES.split()}
    wrapped |= {f"torch:Tensor.{name}": "factory" for name in _TENSOR_FACTORIES.split()}
    return (
        *(
            Patch(target=target, new=calls + name, reason="megatron calls it for its device", required=False)
            for target, name in (emulated | _OTHER_CALLS).items()
        ),
        *(
            _wrap(target, arguments + name, "megatron names cuda in its source")
            for target, name in (wrapped | _WRAPPED).items()
        ),
        _wrap(
            "megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu",
            arguments + "split_sizes_on_host",
            "split sizes that are on the host already must become numbers for gloo's all-to-all",
        ),
        _wrap(
            "megatron.core.tensor_parallel.mappings:_gather_along_first_dim",
            arguments + "gather_along_first_dim",
            "gloo gathers only tensors of one size",
        ),
        _wrap(
            "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding:YarnRotaryEmbedding.__init__",
            arguments + "frequencies_on_host",
            "it makes a device of the number that stands for the current one",
        ),
    )


def _wrap(target: str, new: str, reason: str) -> Patch:
    return Patch(target=target, new=new, kind="wrap", required=False, reason=reason)


_PATCHES = _cpu_patches()
