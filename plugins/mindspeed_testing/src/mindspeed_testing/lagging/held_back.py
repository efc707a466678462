"""Results that nobody has waited for yet: put aside, and in place once somebody has."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mindspeed_testing.lagging.memory import Access
from mindspeed_testing.lagging.streams import LaggingStream
from mindspeed_testing.lagging.values import Pending, poison, put, view_of


class HeldBack:
    """Results with NaN in their places.

    Attributes:
        added: how many there have been.
    """

    def __init__(self) -> None:
        """Start with none."""
        self.added = 0
        self._pending: list[Pending] = []

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self._pending)

    def add(
        self, tensor: Tensor, stream: LaggingStream, count: int, value: Tensor | None = None, work: Any = None
    ) -> None:
        """Let a tensor read as NaN until somebody waits for a piece of work.

        Its arguments are those of `LaggingDevice.hold_back`.
        """
        if tensor.numel() == 0 or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        view = (tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())
        place = view_of(storage, view)
        kept = place.clone() if value is None else value
        poison(place)
        self._pending.append(Pending(stream, count, weakref.ref(storage), view, kept, work))
        self.added += 1

    def settle(self, stream: LaggingStream) -> None:
        """Put results in place that a stream has waited for."""
        if not self._pending:
            return
        due = [
            one
            for one in self._pending
            if one.stream is not stream and stream.knows(one.stream.number, one.count)
        ]
        if due:
            self._pending = [one for one in self._pending if one not in due]
            with _disable_current_modes():
                for one in due:
                    put(one)

    def settle_own(self, stream: LaggingStream, keys: set[int]) -> None:
        """Put results in place that the stream itself made and now goes on with.

        Args:
            stream: that goes on.
            keys: of the storages that it goes on with.
        """
        due = []
        for one in self._pending:
            storage = one.storage()
            known = stream.knows(one.stream.number, one.count)
            if known and storage is not None and storage._cdata in keys:
                due.append(one)
        if due:
            self._pending = [one for one in self._pending if one not in due]
            for one in due:
                put(one)

    def spoil(self, access: Access) -> None:
        """Let the results of a piece of work be NaN: its inputs were not what they should have been."""
        for one in self._pending:
            if one.stream is access.stream and one.count == access.count:
                poison(one.value)

    def drop_unfinished(self) -> None:
        """Forget results that a backend has not filled."""
        self._pending = [one for one in self._pending if one.work is None or one.work.is_completed()]
