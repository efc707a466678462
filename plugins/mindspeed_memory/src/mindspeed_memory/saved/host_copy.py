"""One storage that waits on the host.

Copies to the host and back have a stream each. What is on the device is let go by dropping the reference to
it, once the compute stream has waited for the copy: whoever else holds the storage keeps it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mindspeed_memory.saved.host_pool import HostPool

if TYPE_CHECKING:
    from mindspeed_core.platforms.platform import Platform


class HostCopies:
    """Puts storages on the host.

    Attributes:
        pool: the buffers.
        moved: bytes that went to the host so far.
    """

    def __init__(self, platform: Platform, limit_gib: float | None = None) -> None:
        """Make the streams.

        Args:
            platform: the device.
            limit_gib: most GiB on the host.
        """
        self.platform = platform
        self.pool = HostPool(platform, limit_gib)
        self.away, self.back = platform.stream(), platform.stream()
        self.moved = 0

    def __call__(self, flat: Tensor) -> HostCopy:
        """Begin to copy a whole storage ``[n]``."""
        return HostCopy(self, flat)


class HostCopy:
    """A storage between device and host."""

    def __init__(self, copies: HostCopies, flat: Tensor) -> None:
        """Begin to copy.

        Args:
            copies: what it belongs to.
            flat: the whole storage, ``[n]``.
        """
        self._copies, platform = copies, copies.platform
        self._dtype, self._device, self._count = flat.dtype, flat.device, flat.numel()
        self._host: Tensor | None = None
        buffer, free = copies.pool.take(flat.numel() * flat.element_size())
        self._host = buffer
        copies.away.wait_stream(platform.current_stream())
        if free is not None:
            copies.away.wait_event(free)
        with platform.use_stream(copies.away):
            buffer.view(flat.dtype).copy_(flat, non_blocking=True)
        self._gone = copies.away.record_event()
        self._there: Tensor | None = flat
        self._fetched: tuple[Tensor, Any] | None = None
        copies.moved += buffer.numel()

    def release(self) -> None:
        """Let go of what is on the device; what is computed from now on waits for the copy."""
        if self._there is not None:
            self._copies.platform.current_stream().wait_event(self._gone)
            self._there = None

    def fetch(self) -> None:
        """Begin to copy back, unless it is or was done already."""
        if self._there is not None or self._fetched is not None:
            return
        assert self._host is not None
        copies, platform = self._copies, self._copies.platform
        # On the compute stream, whose later work may have its memory: an allocation of another stream could
        # be given away before this one has read it.
        destination = torch.empty(self._count, dtype=self._dtype, device=self._device)
        copies.back.wait_stream(platform.current_stream())
        copies.back.wait_event(self._gone)
        with platform.use_stream(copies.back):
            destination.copy_(self._host.view(self._dtype), non_blocking=True)
        self._fetched = destination, copies.back.record_event()

    @property
    def is_on_device(self) -> bool:
        """Return whether it is on the device, or on its way there."""
        return self._there is not None or self._fetched is not None

    def flat(self) -> Tensor:
        """Return the storage ``[n]``; whoever reads it on the compute stream waits for the copy."""
        if self._there is not None:
            return self._there
        self.fetch()
        assert self._fetched is not None
        destination, event = self._fetched
        self._copies.platform.current_stream().wait_event(event)
        return destination

    def __del__(self) -> None:
        """Return the buffer; the memory of what was fetched is given away when the copy is done."""
        if self._host is None:
            return
        read = None
        if self._fetched is not None:
            read = self._fetched[1]
            self._copies.platform.current_stream().wait_event(read)
        self._copies.pool.give(self._host, read or self._gone)
