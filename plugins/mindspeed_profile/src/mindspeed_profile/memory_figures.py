"""Figures of device memory as metrics of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mindspeed_core.platforms.platform import Platform
    from mindspeed_core.runtime.metrics import Metrics


def record_figures(platform: Platform, metrics: Metrics, *, device: bool) -> None:
    """Record what tensors take on this rank now and took at most; reduced over ranks with the step.

    Args:
        platform: tells the figures; on CPU those of the process.
        metrics: get ``memory_allocated_bytes`` and ``memory_max_allocated_bytes`` of the fullest rank,
            ``memory_allocated_bytes_least`` of the emptiest.
        device: ``device_memory_used_bytes`` too.
    """
    now = platform.memory_allocated().bytes
    metrics.add("memory_allocated_bytes", now, "max")
    metrics.add("memory_allocated_bytes_least", now, "min")
    metrics.add("memory_max_allocated_bytes", platform.peak_memory().bytes, "max")
    if device:
        metrics.add("device_memory_used_bytes", platform.memory_used().bytes, "max")
