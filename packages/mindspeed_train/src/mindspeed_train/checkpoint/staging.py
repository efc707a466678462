"""A copy of what a rank saves, in memory shared with its writer, so that training goes on in place.

It is kept for the next save of the same layout: getting memory from the system costs as much as the copy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from mindspeed_train.checkpoint.background import BackgroundProcess
from mindspeed_train.checkpoint.background_main import MEMORY_BEGIN

Pinned = Callable[[Sequence[int], torch.dtype], torch.Tensor]
"""Allocates host memory to which a device copies fast."""

_ALIGNMENT = 64
_MOST_THREADS = 4
"""More copy no faster than memory can be read."""
_LEAST_PER_THREAD = 8 << 20


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
        self._form: list[tuple[int, torch.dtype]] = []
        self._shared: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self.places: list[tuple[int, int]] = []

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
        """Copy tensors, contiguously; return offset and length of each in the shared memory.

        They are there once whoever calls has waited for the device and `share`, where there is one, has run;
        until the next call.
        """
        # The planning of a first save puts axes in front of some.
        form = [(tensor.numel(), tensor.dtype) for tensor in tensors]
        if form != self._form:
            self._allocate(form)
        # A device copies all at once; on the host a rank may have cores that nobody uses at this moment.
        parts = 1 if self._pinned is not None else _threads(sum(length for _, length in self.places))
        shares = _shares([length for _, length in self.places], parts)
        copies = [partial(_copy, self._copies[share], tensors[share]) for share in shares]
        with ThreadPoolExecutor(max_workers=len(shares)) as pool:
            others = [pool.submit(copy) for copy in copies[1:]]
            copies[0]()
            for other in others:
                other.result()
        return self.places

    @property
    def share(self) -> Callable[[], None] | None:
        """Return what brings copies in pinned memory into the shared one; None where they are there."""
        return None if self._copies is self._shared else self._move

    def _move(self) -> None:
        for shared, copy in zip(self._shared, self._copies):
            shared.copy_(copy)

    def _allocate(self, form: list[tuple[int, torch.dtype]]) -> None:
        self._form, self._shared, self._copies, self.places = [], [], [], []
        offset = MEMORY_BEGIN
        for count, dtype in form:
            self.places.append((offset, count * dtype.itemsize))
            offset += -(-self.places[-1][1] // _ALIGNMENT) * _ALIGNMENT
        memory = torch.frombuffer(self._process.share(offset - MEMORY_BEGIN), dtype=torch.uint8)
        for (_, dtype), (begin, length) in zip(form, self.places):
            self._shared.append(memory[begin : begin + length].view(dtype))
        pinned = self._pinned
        self._copies = self._shared if pinned is None else [pinned((count,), dtype) for count, dtype in form]
        self._form = form


@torch.no_grad()
def _copy(copies: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    for copy, tensor in zip(copies, tensors):
        copy.view(tensor.shape).copy_(tensor, non_blocking=True)


def _threads(size: int) -> int:
    """Return how many threads copy ``size`` bytes on the host: those that this rank's cores carry."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    own = cores // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, min(own, _MOST_THREADS, size // _LEAST_PER_THREAD))


def _shares(lengths: Sequence[int], parts: int) -> list[slice]:
    """Cut a sequence of tensors into consecutive parts of about as many bytes each."""
    total, done, begin = sum(lengths), 0, 0
    shares: list[slice] = []
    for end, length in enumerate(lengths, 1):
        done += length
        if done * parts >= total * (len(shares) + 1) and len(shares) < parts - 1:
            shares.append(slice(begin, end))
            begin = end
    return [*shares, slice(begin, len(lengths))]
