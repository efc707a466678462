"""Bytes of host buffers that a platform gave for copies from and to the device.

On the cpu platform such a buffer is a tensor like any other; counting where it is given out is what tells
host and device apart there.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from mindspeed_core.instruments.storage import StorageTracker
    from mindspeed_core.session import Session


def mark_host_buffers(session: Session, storage: StorageTracker) -> None:
    """Tell a tracker of every buffer that the platform gives from now on, until the session closes.

    Args:
        session: whose platform it is.
        storage: counts them as the host's, also where the device is the host.
    """
    original = session.platform.pinned_empty

    def pinned_empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        buffer = original(shape, dtype)
        storage.mark_host(buffer)
        return buffer

    session.instances.set("host buffers", session.platform, "pinned_empty", pinned_empty)


class HostBuffers:
    """Follows what ``Platform.pinned_empty`` returns in one session.

    Attributes:
        alive: bytes of the buffers that are alive.
        made: how many buffers were made.
    """

    def __init__(self, session: Session) -> None:
        """Follow the buffers from now on, until the session closes."""
        self.alive = self.made = 0
        original = session.platform.pinned_empty

        def pinned_empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            buffer = original(shape, dtype)
            storage = buffer.untyped_storage()
            self.alive += storage.nbytes()
            self.made += 1
            weakref.finalize(storage, self._freed, storage.nbytes())
            return buffer

        session.instances.set("host buffers", session.platform, "pinned_empty", pinned_empty)

    def _freed(self, amount: int) -> None:
        self.alive -= amount
