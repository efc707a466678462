"""Host buffers by size, made once and used again: allocating a pinned one costs milliseconds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_core.errors import UserError

if TYPE_CHECKING:
    from mindspeed_core.platforms.platform import Platform

_GIB = 2**30


class HostPool:
    """Buffers of one rank.

    Attributes:
        made: buffers made so far.
        held: bytes of all buffers, those that wait to be used again included.
        used: bytes of the buffers that are in use.
    """

    def __init__(
        self,
        platform: Platform,
        limit_gib: float | None = None,
        allocate: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        """Start without buffers.

        Args:
            platform: allocates them.
            limit_gib: most GiB of all buffers of the rank.
            allocate: returns a buffer of so many bytes in the place of the platform's.
        """
        self.made = self.held = self.used = 0
        self._allocate = allocate or (lambda size: platform.pinned_empty((size,), torch.uint8))
        self._limit = limit_gib
        self._free: dict[int, list[tuple[torch.Tensor, Any]]] = defaultdict(list)

    def take(self, size: int) -> tuple[torch.Tensor, Any]:
        """Return a buffer of ``size`` bytes, uint8, and the event after which it may be written, or None.

        Raises:
            UserError: the limit is too low for what is kept on the host.
        """
        self.used += size
        if self._free[size]:
            return self._free[size].pop()
        if self._limit is not None and self.held + size > self._limit * _GIB:
            self.used -= size
            raise UserError(
                f"--swap-host-limit-gb {self._limit:g}: {(self.held + size) / _GIB:.3g} GiB are to be kept "
                "on the host; raise it, swap fewer layers, or use smaller micro-batches"
            )
        self.made += 1
        self.held += size
        return self._allocate(size), None

    def give(self, buffer: torch.Tensor, read: Any = None) -> None:
        """Take a buffer back.

        Args:
            buffer: what `take` returned.
            read: the event after which it is read no more.
        """
        self.used -= buffer.numel()
        self._free[buffer.numel()].append((buffer, read))
