"""Choice of who compresses saved tensors: an NPU's own operators, or operators that every device has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mindspeed_memory.saved.compression import Compressor
from mindspeed_memory.saved.device_compression import DeviceCompressor, addressed_memory
from mindspeed_memory.saved.host_copy import HostCopies
from mindspeed_memory.saved.host_pool import HostPool

if TYPE_CHECKING:
    from mindspeed_core.platforms.platform import Platform

_MODELS = ("Ascend910B", "Ascend910_93")
"""Devices whose operators compress, by the beginning of their names."""


def compressor(
    platform: Platform, *, smallest: int, on_host: bool, limit_gib: float | None
) -> Compressor | DeviceCompressor:
    """Return what compresses on a platform.

    Args:
        platform: of the session.
        smallest: elements below which a storage stays as it is.
        on_host: signs and mantissas go to the host.
        limit_gib: most GiB of the host.
    """
    if "npu" in platform.kinds():
        device = torch.device(platform.device_type, platform.runtime().current_device())  # type: ignore[attr-defined]
        if platform.device_model(device).startswith(_MODELS):
            pool = HostPool(platform, limit_gib, lambda size: addressed_memory(size, device))
            return DeviceCompressor(pool, smallest=smallest, mantissa_on_host=on_host)
    host = HostCopies(platform, limit_gib) if on_host else None
    return Compressor(smallest=smallest, host=host)
