"""Launches of Triton kernels."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Return the context in which a kernel for this tensor is launched: its device is the current one."""
    if tensor.device.type != "cuda" or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


def blocks_of(size: int, block: int) -> int:
    """Return how many blocks cover a size."""
    return -(-size // block)


def power_of_2(size: int) -> int:
    """Return the smallest power of two that is not below a size above zero."""
    return 1 << (size - 1).bit_length()
