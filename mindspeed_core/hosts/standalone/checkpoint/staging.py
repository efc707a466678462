"""A copy of what a rank saves, in host memory, so that training goes on in place while it is written.

The copy lies in shared memory: a forked writer reads it without a page being copied for it. It is kept for
the next save of the same layout, since getting memory from the system costs as much as the copy.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

_ALIGNMENT = 64


class Staging:
    """Host memory of the size of what is saved."""

    def __init__(self) -> None:
        self._form: list[tuple[torch.Size, torch.dtype]] = []
        self._copies: list[torch.Tensor] = []

    @torch.no_grad()
    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of tensors, contiguous and each in a storage of its own; valid until the next call.

        Args:
            tensors: in host memory, or on one device; whoever calls waits for the device.
        """
        form = [(tensor.shape, tensor.dtype) for tensor in tensors]
        if form != self._form:
            self._copies = []
            self._copies = _shared(form)
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
