"""A copy of what a rank saves, in host memory, so that training goes on in place while it is written.

The copy lies in shared memory: a forked writer reads it without a page being copied for it. It is kept for
the next save of the same layout, since getting memory from the system costs as much as the copy.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence

import torch

Pinned = Callable[[Sequence[int], torch.dtype], torch.Tensor]
"""Allocates host memory to which a device copies fast."""

_ALIGNMENT = 64


class Staging:
    """Host memory of the size of what is saved."""

    def __init__(self) -> None:
        self._form: list[tuple[torch.Size, torch.dtype, str]] = []
        self._copies: list[torch.Tensor] = []

    @torch.no_grad()
    def copy(self, tensors: Sequence[torch.Tensor], pinned: Pinned) -> list[torch.Tensor]:
        """Return copies of tensors, contiguous and each in a storage of its own; valid until the next call.

        Args:
            tensors: in host memory, or on a device; whoever calls waits for the device.
            pinned: allocates the copies of tensors on a device. No process copies those pages on a write
                either: nobody writes them while they are read.
        """
        form = [(tensor.shape, tensor.dtype, tensor.device.type) for tensor in tensors]
        if form != self._form:
            self._copies = []
            shared = iter(_shared([(shape, dtype) for shape, dtype, device in form if device == "cpu"]))
            self._copies = [
                next(shared) if device == "cpu" else pinned(shape, dtype) for shape, dtype, device in form
            ]
            self._form = form
        for copy, tensor in zip(self._copies, tensors):
            copy.copy_(tensor, non_blocking=True)
        return list(self._copies)


def _shared(form: Sequence[tuple[torch.Size, torch.dtype]]) -> list[torch.Tensor]:
    sizes = [shape.numel() * dtype.itemsize for shape, dtype in form]
    arena = mmap.mmap(-1, max(1, sum(_aligned(size) for size in sizes)))
    copies, offset = [], 0
    for (shape, dtype), size in zip(form, sizes):
        if size:
            raw = torch.frombuffer(arena, dtype=torch.uint8, count=size, offset=offset)
            copies.append(raw.view(dtype).view(shape))
        else:
            copies.append(torch.empty(shape, dtype=dtype))
        offset += _aligned(size)
    return copies


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
