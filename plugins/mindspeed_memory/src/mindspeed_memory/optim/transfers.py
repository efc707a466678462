"""State of the optimizer that lives on the host, and its way over the device in the step.

Two buffers on the device take turns: while one window is updated in the first, the next is copied into the
second, and the one before is copied back. Each direction has a stream of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from mindspeed_core.platforms.platform import Platform

Parts = Sequence[torch.Tensor]
"""Ranges of tensors on the host, flat and of float32."""


@dataclass
class Staged:
    """A window on the device.

    Attributes:
        host: the ranges that it is a copy of.
        device: the copies, in the same order.
    """

    host: Parts
    device: list[torch.Tensor] = field(default_factory=list)
    arrived: Any = None
    left: Any = None


class Transfers:
    """Copies windows in and out, in order."""

    def __init__(self, platform: Platform, device: torch.device) -> None:
        """Make both streams."""
        self._platform = platform
        self._device = device
        self._inward, self._outward = platform.stream(), platform.stream()
        self._buffers: list[torch.Tensor | None] = [None, None]
        self._users: list[Staged | None] = [None, None]
        self._turn = 0

    def open(self, elements: Sequence[int]) -> None:
        """Take the buffers, in which ranges of so many elements together find room."""
        largest = sorted(elements, reverse=True)[:2]
        for index in range(2):
            size = largest[0] if index < len(largest) else 0
            self._buffers[index] = torch.empty(size, dtype=torch.float32, device=self._device)
        # What the compute stream did with this memory before is over for the copies too.
        self._inward.wait_stream(self._platform.current_stream())

    def fetch(self, host: Parts) -> Staged:
        """Begin to copy a window to the device."""
        slot, self._turn = self._turn, 1 - self._turn
        buffer, before = self._buffers[slot], self._users[slot]
        assert buffer is not None
        staged = Staged(host)
        if before is not None:
            self._inward.wait_event(before.left)
        start = 0
        with self._platform.use_stream(self._inward):
            for part in host:
                copy = buffer[start : start + part.numel()]
                copy.copy_(part, non_blocking=True)
                staged.device.append(copy)
                start += part.numel()
            staged.arrived = self._inward.record_event()
        self._users[slot] = staged
        return staged

    def wait(self, staged: Staged) -> None:
        """Let the compute stream wait until a window has arrived."""
        self._platform.current_stream().wait_event(staged.arrived)

    def store(self, staged: Staged) -> None:
        """Begin to copy a window back that the compute stream has changed."""
        self._outward.wait_stream(self._platform.current_stream())
        with self._platform.use_stream(self._outward):
            for part, copy in zip(staged.host, staged.device):
                part.copy_(copy, non_blocking=True)
            staged.left = self._outward.record_event()

    def close(self) -> None:
        """Wait until everything is back on the host, and free the buffers."""
        for staged in self._users:
            if staged is not None and staged.left is not None:
                self._platform.current_stream().wait_event(staged.left)
                staged.left.synchronize()
        self._users = [None, None]
        self._buffers = [None, None]
