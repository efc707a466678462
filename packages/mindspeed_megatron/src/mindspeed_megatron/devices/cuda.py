"""NVIDIA devices through ``torch.cuda``, with NCCL. megatron-core runs on them unchanged."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from mindspeed_core.discovery.installed import package_file
from mindspeed_core.errors import SessionError
from mindspeed_core.feature import Patch
from mindspeed_core.platforms.machine import first_match
from mindspeed_core.platforms.platform import Availability, OpeningSession
from mindspeed_megatron.devices.accelerator import AcceleratorPlatform
from mindspeed_megatron.devices.without_te import patches_without_te

if TYPE_CHECKING:
    from mindspeed_core.platforms.platform import StepBytes

_BUILT_FOR = re.compile(r"^cuda\b[^=]*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)


class CudaPlatform(AcceleratorPlatform):
    """An NVIDIA device."""

    name: ClassVar[str] = "cuda"
    device_type: ClassVar[str] = "cuda"
    backend: ClassVar[str] = "nccl"
    preference: ClassVar[int] = 10
    visible_devices: ClassVar[str] = "CUDA_VISIBLE_DEVICES"

    @classmethod
    def probe(cls) -> Availability:
        """Look for device files and a torch that was built for CUDA; imports nothing."""
        if os.environ.get(cls.visible_devices, "0").strip() in ("", "-1"):
            return Availability(False, f"{cls.visible_devices} hides every device")
        count = _device_files("/dev")
        if not count:
            return Availability(False, "no NVIDIA device file in /dev")
        built_for = _torch_built_for()
        if not built_for:
            return Availability(False, "the installed torch is not built for CUDA")
        return Availability(True, f"{count} NVIDIA device(s), torch built for CUDA {built_for}")

    def runtime(self) -> Any:
        """Return ``torch.cuda``."""
        import torch

        return torch.cuda

    def driver(self) -> str:
        """Return the version of the kernel driver."""
        from pathlib import Path

        return first_match(Path("/proc/driver/nvidia/version"), r"(?:Kernel Module|for \S+)\s+([\d.]+)")

    def energy(self) -> float | None:
        """Ask NVIDIA's management library, where its Python package is installed."""
        import torch

        try:
            pynvml: Any = import_module("pynvml")

            millijoules = pynvml.nvmlDeviceGetTotalEnergyConsumption(torch.cuda._get_pynvml_handler())
        except Exception:
            # Some devices and containers do not tell, each with an exception of its own.
            return None
        return float(millijoules) / 1000.0

    def patches(self) -> Sequence[Patch]:
        """Return the names that megatron-core lacks without TransformerEngine."""
        return patches_without_te()

    def open(self, session: OpeningSession) -> None:
        """Verify that the driver answers.

        Raises:
            SessionError: it does not.
        """
        import torch

        if not torch.cuda.is_available():
            raise SessionError(
                "platform cuda: torch.cuda.is_available() is False with this driver and torch "
                f"{torch.__version__} (CUDA {torch.version.cuda}); mindspeed-features doctor says more, "
                "or choose --platform cpu"
            )

    def step_bytes(self) -> StepBytes:
        """Return the allocator's count: under a dispatch mode compiled dropout would draw other numbers."""
        from mindspeed_megatron.instruments.allocator_bytes import AllocatorBytes

        return AllocatorBytes(self)

    def allocator_settings(self, settings: str) -> None:
        """Set options of the caching allocator, in the syntax of ``PYTORCH_CUDA_ALLOC_CONF``."""
        import torch

        change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        if change is None:
            change = torch.cuda.memory._set_allocator_settings
        change(settings)


def _device_files(directory: str | os.PathLike[str]) -> int:
    """Count the devices that the driver, or WSL's adapter, shows."""
    names = os.listdir(directory) if os.path.isdir(directory) else []
    numbered = [name for name in names if name.startswith("nvidia") and name[6:].isdigit()]
    return len(numbered) or int("dxg" in names)


def _torch_built_for() -> str:
    """Return the CUDA version in torch's version file, or an empty string."""
    file = package_file("torch:version.py")
    found = _BUILT_FOR.search(file.read_text(encoding="utf-8")) if file is not None else None
    return found.group(1) if found else ""
