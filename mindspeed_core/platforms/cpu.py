"""The CPU as a device: any machine trains, and megatron-core's cuda calls mean the CPU.

megatron-core names cuda in its source. While a session is open on this platform, ``torch.cuda`` functions,
tensor factories and a few tensor methods are patched so that those calls work without a device; each patch is
in the session's ledger and gone when it closes. ``torch.cuda.is_available()`` stays False, so that libraries
which ask do the right thing.
"""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import ClassVar

from mindspeed_core.errors import ArgumentError, SessionError
from mindspeed_core.feature import Patch
from mindspeed_core.platforms import process_memory
from mindspeed_core.platforms.eager import hold_eager
from mindspeed_core.platforms.platform import Availability, MemoryFigure, OpeningSession, Platform
from mindspeed_core.platforms.without_te import patches_without_te

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
_RNG_LOGGERS = (
    "megatron.core.tensor_parallel.random",
    "megatron.core.distributed.fsdp.src.megatron_fsdp.utils",
)
_REFUSED = (
    ("ddp_average_in_collective", (True,), "gloo has no averaging reduction", "leave it out"),
    ("cuda_graph_impl", ("local", "transformer_engine"), "there are no graphs on CPU", "use none"),
    ("enable_cuda_graph", (True,), "there are no graphs on CPU", "leave it out"),
    ("external_cuda_graph", (True,), "there are no graphs on CPU", "leave it out"),
)


class CpuPlatform(Platform):
    """The CPU, with gloo.

    The device's random generator is torch's default CPU generator: what is seeded, forked and restored as
    "cuda state" is what dropout draws from. ``torch.compile`` runs eagerly while the session is open:
    compiling for CPU takes minutes and changes bits.
    """

    name: ClassVar[str] = "cpu"
    device_type: ClassVar[str] = "cpu"
    backend: ClassVar[str] = "gloo"
    preference: ClassVar[int] = 0
    collectives_asynchronous: ClassVar[bool] = False
    # gloo copies the input of the one and gathers the other into a buffer of its own.
    backend_temporaries: ClassVar[Mapping[str, float]] = {
        "reduce_scatter_tensor": 1.0,
        "all_gather_into_tensor": 1.0,
    }

    @classmethod
    def probe(cls) -> Availability:
        """Answer that every machine has a CPU."""
        return Availability(True, "every machine has a CPU")

    def patches(self) -> Sequence[Patch]:
        """Return the emulation of ``torch.cuda``.

        Raises:
            SessionError: this process already uses a device whose tensors the emulation would redirect.
        """
        _refuse_mixed_process()
        _fill_caches_of_torch()
        return (*_PATCHES, *patches_without_te())

    def check_arguments(self, args: Namespace) -> None:
        """Refuse a flag that asks for something that a CPU does not have."""
        for name, values, reason, remedy in _REFUSED:
            value = getattr(args, name, None)
            if value in values:
                raise ArgumentError(
                    "--" + name.replace("_", "-"), value, reason, f"{remedy} with --platform cpu"
                )

    def open(self, session: OpeningSession) -> None:
        """Run ``torch.compile``d functions eagerly and drop the warning about the shared generator."""
        hold_eager(
            session,
            owner=self.name,
            reason="compiling for CPU takes minutes and is not bit-identical to eager execution",
        )
        for logger in map(logging.getLogger, _RNG_LOGGERS):
            session.ledger.setting(
                f"logging:{logger.name}.filters",
                lambda logger=logger: logger.addFilter(_is_informative),  # type: ignore[misc]
                lambda logger=logger: logger.removeFilter(_is_informative),  # type: ignore[misc]
                owner=self.name,
                reason="device and host share one generator, a fork always looks like a change of both",
            )

    def memory_allocated(self) -> MemoryFigure:
        """Return the resident bytes of this process."""
        return MemoryFigure(process_memory.resident_bytes(), process_memory.SOURCE)

    def peak_memory(self) -> MemoryFigure:
        """Return the peak resident bytes since `reset_peak_memory`, where Linux permits resetting."""
        return MemoryFigure(process_memory.peak_resident_bytes(), process_memory.SOURCE)

    def reset_peak_memory(self) -> None:
        """Start a new peak; without permission to, the peak stays that of the whole process."""
        process_memory.reset_peak()

    def memory_used(self) -> MemoryFigure:
        """Return the bytes of the machine that are in use, by whatever process."""
        used = process_memory.physical_bytes() - process_memory.available_bytes()
        return MemoryFigure(used, "memory of the machine")

    def total_memory(self) -> int:
        """Return the bytes that a process may have; all processes of the machine share them."""
        return process_memory.attainable_bytes()


def _is_informative(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed within GPU RNG context" not in str(record.msg)


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
    calls = "mindspeed_core.platforms.cuda_calls:"
    arguments = "mindspeed_core.platforms.device_arguments:"
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
            "mindspeed_core.platforms.uneven_gather:gather_along_first_dim",
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
