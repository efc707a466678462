"""The common part of cuda and npu, whose runtimes have one interface: ``torch.cuda`` and ``torch.npu``.

Every method calls the runtime module that the platform names; the two differ in how they are found, verified
and prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from mindspeed_core.errors import UserError
from mindspeed_core.platforms.platform import MemoryFigure, Platform

if TYPE_CHECKING:
    import torch


class AcceleratorPlatform(Platform):
    """A device with a caching allocator, streams, events and a generator of its own."""

    collectives_asynchronous: ClassVar[bool] = True
    memory_is_host: ClassVar[bool] = False
    visible_devices: ClassVar[str] = ""
    """The environment variable that limits which devices a process sees."""

    def runtime(self) -> Any:
        """Return ``torch.cuda`` or ``torch.npu``."""
        raise TypeError(f"platform {self.name} does not implement runtime()")

    def device(self, local_rank: int) -> torch.device:
        """Return the device with the number of the process on its node."""
        import torch

        return torch.device(self.device_type, local_rank)

    def set_device(self, local_rank: int) -> None:
        """Make the device current.

        Raises:
            UserError: this node has fewer devices than processes.
        """
        count = self.runtime().device_count()
        if local_rank >= count:
            raise UserError(
                f"local rank {local_rank} has no device, {count} {self.name} device(s) are visible; start "
                f"fewer processes per node, or make more visible with {self.visible_devices}"
            )
        self.runtime().set_device(local_rank)

    def device_model(self, device: torch.device) -> str:
        """Return the runtime's name of a device."""
        return str(self.runtime().get_device_name(device))

    def supported_dtypes(self) -> frozenset[torch.dtype]:
        """Return float32, float16, and bfloat16 where the device has it."""
        import torch

        always = {torch.float32, torch.float16}
        return frozenset(always | ({torch.bfloat16} if self.runtime().is_bf16_supported() else set()))

    def memory_allocated(self) -> MemoryFigure:
        """Return the bytes in tensors, as the caching allocator counts them."""
        return MemoryFigure(self.runtime().memory_allocated(), f"{self.name} allocator")

    def peak_memory(self) -> MemoryFigure:
        """Return the most bytes in tensors since `reset_peak_memory`."""
        return MemoryFigure(self.runtime().max_memory_allocated(), f"{self.name} allocator")

    def reset_peak_memory(self) -> None:
        """Start a new peak measurement."""
        self.runtime().reset_peak_memory_stats()

    def record_memory(self, entries: int = 100_000) -> None:
        """Let the allocator record its blocks with their Python stacks, some microseconds for each."""
        memory = self.runtime().memory
        self._recorded = entries or None
        if entries:
            memory._record_memory_history(enabled="all", stacks="python", max_entries=entries)
        else:
            memory._record_memory_history(enabled=None)

    def _snapshot(self) -> dict[str, Any]:
        snapshot: dict[str, Any] = self.runtime().memory._snapshot()
        return snapshot

    def memory_used(self) -> MemoryFigure:
        """Return the bytes of the current device that are in use, by whatever process."""
        free, total = self.runtime().mem_get_info()
        return MemoryFigure(int(total) - int(free), f"{self.name} device")

    def total_memory(self) -> int:
        """Return the bytes of the current device."""
        return int(self.runtime().mem_get_info()[1])

    def set_memory_limit(self, fraction: float) -> None:
        """Let the allocator use at most this fraction of the device."""
        self.runtime().set_per_process_memory_fraction(fraction)

    def memory_pool(self) -> Callable[[], AbstractContextManager[Any]]:
        """Make a pool of the caching allocator, with segments of its own."""
        pool = self.runtime().MemPool()
        return lambda: self.runtime().use_mem_pool(pool)

    def empty_cache(self) -> None:
        """Return cached blocks to the device."""
        self.runtime().empty_cache()

    def synchronize(self) -> None:
        """Wait for every stream of the current device."""
        self.runtime().synchronize()

    def stream(self, priority: int = 0) -> Any:
        """Make a stream of the runtime."""
        return self.runtime().Stream(priority=priority)

    def current_stream(self) -> Any:
        """Return the runtime's current stream."""
        return self.runtime().current_stream()

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return the runtime's stream context."""
        context: AbstractContextManager[Any] = self.runtime().stream(stream)
        return context

    def event(self, enable_timing: bool = False) -> Any:
        """Make an event of the runtime."""
        return self.runtime().Event(enable_timing=enable_timing)

    def pinned_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a page-locked host buffer."""
        import torch

        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def rng_state(self) -> torch.Tensor:
        """Return the state of the current device's generator, uint8 on the host."""
        state: torch.Tensor = self.runtime().get_rng_state()
        return state

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore the current device's generator."""
        self.runtime().set_rng_state(state)
