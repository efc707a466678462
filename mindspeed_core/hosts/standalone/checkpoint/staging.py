"""A copy of what a rank saves, in memory shared with its writer, so that training goes on in place.

It is kept for the next save of the same layout: getting memory from the system costs as much as the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mindspeed_core.hosts.standalone.checkpoint.background import BackgroundProcess
from mindspeed_core.hosts.standalone.checkpoint.background_main import MEMORY_BEGIN

Pinned = Callable[[Sequence[int], torch.dtype], torch.Tensor]
"""Allocates host memory to which a device copies fast."""

_ALIGNMENT = 64


class Staging:
    """Host memory of the size of what is saved; twice that where the state lies on a device."""

    def __init__(self, process: BackgroundProcess, pinned: Pinned | None = None) -> None:
        """Get no memory yet.

        Args:
            process: reads the copies.
            pinned: allocates what tensors are copied to first. A device copies fast only to such
                memory, which no other process sees.
        """
        self._process, self._pinned = process, pinned
        self._form: list[tuple[torch.Size, torch.dtype]] = []
        self._shared: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self.places: list[tuple[int, int]] = []

    @torch.no_grad()
    def copy(self, tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
        """Copy tensors, contiguously; return offset and length of each in the shared memory.

        They are there once whoever calls has waited for the device and `share`, where there is one, has run;
        until the next call.
        """
        form = [(tensor.shape, tensor.dtype) for tensor in tensors]
        if form != self._form:
            self._allocate(form)
        for copy, tensor in zip(self._copies, tensors):
            copy.copy_(tensor, non_blocking=True)
        return self.places

    @property
    def share(self) -> Callable[[], None] | None:
        """Return what brings copies in pinned memory into the shared one; None where they are there."""
        return None if self._copies is self._shared else self._move

    def _move(self) -> None:
        for shared, copy in zip(self._shared, self._copies):
            shared.copy_(copy)

    def _allocate(self, form: list[tuple[torch.Size, torch.dtype]]) -> None:
        self._form, self._shared, self._copies, self.places = [], [], [], []
        offset = MEMORY_BEGIN
        for shape, dtype in form:
            self.places.append((offset, shape.numel() * dtype.itemsize))
            offset += -(-self.places[-1][1] // _ALIGNMENT) * _ALIGNMENT
        memory = torch.frombuffer(self._process.share(offset - MEMORY_BEGIN), dtype=torch.uint8)
        for (shape, dtype), (begin, length) in zip(form, self.places):
            self._shared.append(memory[begin : begin + length].view(dtype).view(shape))
        pinned = self._pinned
        self._copies = self._shared if pinned is None else [pinned(shape, dtype) for shape, dtype in form]
        self._form = form
