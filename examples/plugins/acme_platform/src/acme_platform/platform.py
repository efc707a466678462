"""The platform ``acme``: what mindspeed-core asks of a device, answered by the device's runtime.

Copy this file, put your runtime behind `runtime`, and go through the methods from top to bottom. As it comes,
the CPU stands in for the device, so that everything can be run: names and figures say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from mindspeed_core.feature import Patch
from mindspeed_core.platforms.accelerator import AcceleratorPlatform
from mindspeed_core.platforms.platform import Availability, MemoryFigure, OpeningSession, Platform

if TYPE_CHECKING:
    import torch


class AcmePlatform(AcceleratorPlatform):
    """An Acme device, for which the CPU stands in."""

    name: ClassVar[str] = "acme"
    # Features that list the cpu run here too. A device whose runtime has CUDA's names says "cuda".
    like: ClassVar[str] = "cpu"
    # Of a real device its own: torch.rename_privateuse1_backend("acme") makes a device type, a C++ extension
    # of torch.distributed a backend.
    device_type: ClassVar[str] = "cpu"
    backend: ClassVar[str] = "gloo"
    # "auto" takes the highest: a stand-in is below every real device, and below the cpu platform.
    preference: ClassVar[int] = -10
    collectives_asynchronous: ClassVar[bool] = False
    visible_devices: ClassVar[str] = "ACME_VISIBLE_DEVICES"
    # Distributions whose versions all ranks compare at the start: the driver package of the device.
    distributions: ClassVar[Sequence[str]] = ("acme-platform",)

    def __init__(self) -> None:
        """Wrap the cpu platform; a session makes one instance."""
        from mindspeed_core.platforms.cpu import CpuPlatform

        self._cpu = CpuPlatform()

    @classmethod
    def probe(cls) -> Availability:
        """Look for the device without starting it: a device file, a driver package. Imports no torch."""
        return Availability(True, "the CPU stands in for an Acme device")

    def runtime(self) -> Any:
        """Return the module with the interface of ``torch.cuda``: ``torch_acme`` for a real device."""
        from acme_platform import runtime

        return runtime

    def patches(self) -> Sequence[Patch]:
        """Return the patches that let this device answer megatron-core's calls of ``torch.cuda``.

        The stand-in computes on CPU, so the emulation of the cpu platform is right for it.
        """
        return self._cpu.patches()

    def open(self, session: OpeningSession) -> None:
        """Prepare the process, after the patches: settings that `session.ledger` takes back."""
        self._cpu.open(session)

    def device(self, local_rank: int) -> torch.device:
        """Of a real device ``torch.device("acme", local_rank)``, which is what the base class gives."""
        import torch

        return torch.device(self.device_type)

    # Of a real device inherited: its allocator records its blocks. The stand-in follows tensors instead.
    record_memory = Platform.record_memory
    _snapshot = Platform._snapshot

    def memory_allocated(self) -> MemoryFigure:
        """Bytes in use, with the source that is printed beside them."""
        return MemoryFigure(self.runtime().memory_allocated(), self.runtime().MEMORY_SOURCE)

    def peak_memory(self) -> MemoryFigure:
        """Most bytes in use since `reset_peak_memory`."""
        return MemoryFigure(self.runtime().max_memory_allocated(), self.runtime().MEMORY_SOURCE)

    def pinned_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A host buffer; the base class locks its pages, which needs a device."""
        import torch

        return torch.empty(tuple(shape), dtype=dtype)
