"""The platform ``lagging``: a CPU whose streams and collectives do everything as late as they may."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from mindspeed_core.feature import Patch
from mindspeed_core.platforms.cpu import CpuPlatform
from mindspeed_core.platforms.platform import Availability, MemoryFigure, OpeningSession

if TYPE_CHECKING:
    import torch

    from mindspeed_core.platforms.platform import StepBytes
    from mindspeed_testing.lagging.device import LaggingDevice


class LaggingPlatform(CpuPlatform):
    """The CPU as a device that is late, and whose backend refuses what HCCL or NCCL refuses.

    Closing a session raises `mindspeed_testing.lagging.findings.LaggingDeviceError` when the run relied on an
    order that nothing promises.
    """

    name: ClassVar[str] = "lagging"
    like: ClassVar[str] = "cpu"
    preference: ClassVar[int] = -100
    collectives_asynchronous: ClassVar[bool] = True
    memory_is_host: ClassVar[bool] = False

    _made: Any = None

    @classmethod
    def probe(cls) -> Availability:
        """Answer that every machine can be late."""
        return Availability(True, "a CPU whose streams and collectives are late, for tests")

    @property
    def lagging_device(self) -> LaggingDevice:
        """Return the device of this session."""
        if self._made is None:
            from mindspeed_testing.lagging.device import LaggingDevice

            self._made = LaggingDevice()
        device: LaggingDevice = self._made
        return device

    def patches(self) -> Sequence[Patch]:
        """Return the emulation of ``torch.cuda`` with streams that lag, and late collectives."""
        from mindspeed_megatron.backend_contracts.hccl import HCCL
        from mindspeed_megatron.backend_contracts.nccl import NCCL
        from mindspeed_testing.lagging.backend_rules import rules_of
        from mindspeed_testing.lagging.communication import communication_patches
        from mindspeed_testing.lagging.compiled_dropout import compiled_dropout
        from mindspeed_testing.lagging.cuda_runtime import runtime_patches

        ours = runtime_patches(self.lagging_device)
        rest = [patch for patch in super().patches() if patch.target not in ours]
        late = communication_patches(self.lagging_device)
        self.lagging_device.communication.rules.append(rules_of((HCCL["910B"], NCCL)))
        return (*rest, *ours.values(), *late, compiled_dropout(self.lagging_device))

    def start(self, session: OpeningSession) -> None:
        """Follow operations from now on."""
        self.lagging_device.start()

    def close(self, session: OpeningSession) -> None:
        """End everything that waits.

        Raises:
            LaggingDeviceError: the run relied on an order that nothing promises.
        """
        super().close(session)
        self.lagging_device.stop()
        self.lagging_device.findings.raise_any()

    def memory_allocated(self) -> MemoryFigure:
        """Return the bytes of tensors, counted as an allocator does."""
        return MemoryFigure(self.lagging_device.allocated, "lagging device")

    def peak_memory(self) -> MemoryFigure:
        """Return the most bytes of tensors since `reset_peak_memory`."""
        return MemoryFigure(self.lagging_device.peak, "lagging device")

    def reset_peak_memory(self) -> None:
        """Start a new peak measurement."""
        self.lagging_device.reset_peak()

    def step_bytes(self) -> StepBytes:
        """Return the allocator's count: compiled dropout draws other numbers under a dispatch mode."""
        from mindspeed_megatron.instruments.allocator_bytes import AllocatorBytes

        return AllocatorBytes(self)

    def synchronize(self) -> None:
        """Let the host wait for all streams."""
        self.lagging_device.synchronize()

    def stream(self, priority: int = 0) -> Any:
        """Make a stream whose work is done when somebody waits for it."""
        return self.lagging_device.stream(priority=priority)

    def current_stream(self) -> Any:
        """Return the stream in use."""
        return self.lagging_device.current()

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Launch on ``stream`` inside the context."""
        return self.lagging_device.on(stream)

    def event(self, enable_timing: bool = False) -> Any:
        """Make an event."""
        return self.lagging_device.event(enable_timing)

    def pinned_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a host buffer from and to which copies are asynchronous."""
        return self.lagging_device.pin(super().pinned_empty(shape, dtype))
