"""The runtime of the stand-in: the part of ``torch.cuda``'s interface that platforms use, on CPU.

A real platform has no such file: its vendor's package (``torch.acme``, ``torch_acme``) offers these names.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from mindspeed_core.platforms import process_memory
from mindspeed_core.platforms.streams import HostEvent, HostStream

MEMORY_SOURCE = f"{process_memory.SOURCE}, in place of a device's allocator"

Stream = HostStream
Event = HostEvent

_current = 0


def device_count() -> int:
    """Return the number of processes on this node: what the variable names, otherwise one per core."""
    visible = os.environ.get("ACME_VISIBLE_DEVICES")
    if visible is None:
        return os.cpu_count() or 1
    return len([name for name in visible.split(",") if name.strip()])


def set_device(index: int) -> None:
    """Remember which device this process would use."""
    global _current
    _current = index


def current_device() -> int:
    """The device of this process."""
    return _current


def get_device_name(device: Any = None) -> str:
    """The name that reports show."""
    return "CPU in place of an Acme device"


def is_bf16_supported() -> bool:
    """The CPU computes in bfloat16."""
    return True


def memory_allocated() -> int:
    """Bytes resident in this process."""
    return process_memory.resident_bytes()


def max_memory_allocated() -> int:
    """Most bytes resident since `reset_peak_memory_stats`."""
    return process_memory.peak_resident_bytes()


def reset_peak_memory_stats() -> None:
    """Start a new peak, where the operating system permits."""
    process_memory.reset_peak()


def mem_get_info() -> tuple[int, int]:
    """Free and all bytes of the machine."""
    return process_memory.available_bytes(), process_memory.physical_bytes()


def set_per_process_memory_fraction(fraction: float) -> None:
    """The CPU has no allocator to restrict."""


def empty_cache() -> None:
    """The CPU has no cache of blocks."""


def synchronize() -> None:
    """Everything has finished."""


def current_stream() -> HostStream:
    """The only stream."""
    return HostStream()


def stream(chosen: Any) -> AbstractContextManager[Any]:
    """A context in which work goes to a stream."""
    return nullcontext(chosen)


def get_rng_state() -> torch.Tensor:
    """State of the generator that dropout draws from, uint8."""
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor) -> None:
    """Restore what `get_rng_state` returned."""
    torch.set_rng_state(state)
