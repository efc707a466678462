"""Answers of the cpu platform to what Megatron-LM asks of a device beyond what megatron-core does.

The platform itself answers for ``torch.cuda`` as a whole; Megatron-LM's scripts insist besides on a device
that is there, has a name and an age, and on CUDA kernels compiled at the start.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from mindspeed_core.platforms import process_memory

CAPABILITY = (8, 0)
"""Of a device that needs CUDA_DEVICE_MAX_CONNECTIONS, as every one before Blackwell does."""


def says_available(original: Callable[[], bool]) -> Callable[[], bool]:
    """Intercept ``torch.cuda.is_available``: what stands for the device is there."""

    @functools.wraps(original)
    def is_available() -> bool:
        return True

    return is_available


def no_accelerator() -> bool:
    """Return that there is none, which data loaders ask before they pin memory."""
    return False


def get_device_properties(device: Any = None) -> SimpleNamespace:
    """Return name, age and size of the CPU."""
    return SimpleNamespace(
        name="cpu",
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=process_memory.physical_bytes(),
        multi_processor_count=os.cpu_count() or 1,
        warp_size=32,
    )


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """Return `CAPABILITY`."""
    return CAPABILITY


def get_device_name(device: Any = None) -> str:
    """Return a name for a log."""
    return "cpu"


def old_enough(original: Callable[[], int]) -> Callable[[], int]:
    """Intercept ``get_device_arch_version``: the device is old enough to need nothing special."""

    @functools.wraps(original)
    def get_device_arch_version() -> int:
        return CAPABILITY[0]

    return get_device_arch_version


def no_kernels(original: Callable[..., Any]) -> Callable[..., Any]:
    """Intercept ``fused_kernels.load``: the kernels belong to options that are off here."""

    @functools.wraps(original)
    def load(args: Any) -> None:
        return None

    return load
