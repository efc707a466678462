"""Bytes of host buffers that a platform gave for copies from and to the device.

On the cpu platform such a buffer is a tensor like any other; counting where it is given out is what tells
host and device apart there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from mindspeed_core.platforms.platform import Platform
    from mindspeed_core.runtime.instance_patches import Instances
    from mindspeed_megatron.instruments.storage import StorageTracker


def mark_host_buffers(platform: Platform, instances: Instances, storage: StorageTracker) -> None:
    """Tell a tracker of every buffer that a platform gives from now on, until the session closes.

    Args:
        platform: the session's.
        instances: the session's changes of instances, which end with it.
        storage: counts them as the host's, also where the device is the host.
    """
    _follow(platform, instances, storage.mark_host)


class HostBuffers:
    """Follows what ``Platform.pinned_empty`` returns in one session.

    Attributes:
        alive: bytes of the buffers that are alive.
        made: how many buffers were made.
    """

    def __init__(self, platform: Platform, instances: Instances) -> None:
        """Follow the buffers of a session's platform from now on, until its changes of instances end."""
        self.alive = self.made = 0
        _follow(platform, instances, self._count)

    def _count(self, buffer: torch.Tensor) -> None:
        storage = buffer.untyped_storage()
        self.alive += storage.nbytes()
        self.made += 1
        weakref.finalize(storage, self._freed, storage.nbytes())

    def _freed(self, amount: int) -> None:
        self.alive -= amount


def _follow(platform: Platform, instances: Instances, seen: Callable[[torch.Tensor], None]) -> None:
    original = platform.pinned_empty

    def pinned_empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        buffer = original(shape, dtype)
        seen(buffer)
        return buffer

    instances.set("host buffers", platform, "pinned_empty", pinned_empty)
