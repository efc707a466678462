"""Collectives that are launched in one place of a program and waited for in another.

Each is a pair of autograd nodes. What a program executes between launch and wait hides the communication;
backward mirrors both: the node of the wait launches the collective of gradients, the node of the launch waits
for it. Autograd takes the ready node that was created last, so that what stands between the two nodes in
forward, or was created there, is computed between the mirrored launch and its wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class Exchange(ABC):
    """One communication of rows and its mirror, of one call of a layer.

    Each direction keeps its send buffer until it is waited for, since a device may still read it, and nothing
    afterwards.

    Attributes:
        name: for whoever records the order of events.
        before_gradients: called in backward before it waits for the gradients.
    """

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        """Describe the exchange.

        Args:
            name: for whoever records the order of events.
            group: the ranks that exchange rows.
        """
        self.name = name
        self.group = group
        self.before_gradients: Callable[[], None] = _nothing
        self._work: Any = None
        self._buffers: tuple[Tensor, ...] = ()

    def launch(self, rows: Tensor) -> Tensor:
        """Start sending this rank's rows ``[n, ...]``; returns a buffer ``[m, ...]`` for `wait`."""
        if self.group.size() == 1:
            return rows
        result: Tensor = _Launch.apply(rows, self)
        return result

    def wait(self, buffer: Tensor) -> Tensor:
        """Return the received rows, once they are there; the only reader of what `launch` returned."""
        if self.group.size() == 1:
            return buffer
        result: Tensor = _Wait.apply(buffer, self)
        return result

    def start(self, rows: Tensor, *, mirrored: bool) -> Tensor:
        """Start one direction, and return the buffer that is being filled."""
        if self.group.size() == 1:
            self._buffers = rows, rows
            return rows
        rows = rows.contiguous()
        buffer = rows.new_empty((self._length(rows, mirrored), *rows.shape[1:]))
        self._work = self._communicate(buffer, rows, mirrored)
        self._buffers = (buffer, rows)
        return buffer

    def finish(self) -> Tensor:
        """Wait for the direction that was started, and return its buffer."""
        if self._work is not None:
            self._work.wait()
        buffer, _ = self._buffers
        # A finished handle holds its tensors.
        self._work, self._buffers = None, ()
        return buffer

    @abstractmethod
    def _length(self, rows: Tensor, mirrored: bool) -> int:
        """Return how many rows arrive."""

    @abstractmethod
    def _communicate(self, buffer: Tensor, rows: Tensor, mirrored: bool) -> Any:
        """Launch the collective of one direction, and return its handle."""


class AllToAll(Exchange):
    """Rows from every rank to every rank; gradients take the same way back."""

    def __init__(
        self, name: str, group: dist.ProcessGroup, received: Sequence[int], sent: Sequence[int]
    ) -> None:
        """Describe the exchange.

        Args:
            name: see `Exchange`.
            group: see `Exchange`.
            received: rows from each rank, in the order of the group.
            sent: rows to each rank.
        """
        super().__init__(name, group)
        self._received, self._sent = list(received), list(sent)

    def _length(self, rows: Tensor, mirrored: bool) -> int:
        return sum(self._sent if mirrored else self._received)

    def _communicate(self, buffer: Tensor, rows: Tensor, mirrored: bool) -> Any:
        received, sent = (self._sent, self._received) if mirrored else (self._received, self._sent)
        return dist.all_to_all_single(buffer, rows, received, sent, group=self.group, async_op=True)


class AllGather(Exchange):
    """The rows of all ranks for each of them; gradients are summed over ranks, each gets its part."""

    _sums = False

    def _length(self, rows: Tensor, mirrored: bool) -> int:
        size = self.group.size()
        return rows.shape[0] // size if mirrored != self._sums else rows.shape[0] * size

    def _communicate(self, buffer: Tensor, rows: Tensor, mirrored: bool) -> Any:
        if mirrored != self._sums:
            return dist.reduce_scatter_tensor(buffer, rows, group=self.group, async_op=True)
        return dist.all_gather_into_tensor(buffer, rows, group=self.group, async_op=True)


class ReduceScatter(AllGather):
    """The mirror of `AllGather`: rows are summed over ranks, each gets its part of the sums."""

    _sums = True


class GatherRows(Exchange):
    """The unequally many rows of all ranks for each of them; each gets its part of summed gradients."""

    _sums = False

    def __init__(self, name: str, group: dist.ProcessGroup, rows: Sequence[int]) -> None:
        """Describe the exchange.

        Args:
            name: see `Exchange`.
            group: see `Exchange`.
            rows: of each rank, in the order of the group.
        """
        super().__init__(name, group)
        self._rows = list(rows)

    def _length(self, rows: Tensor, mirrored: bool) -> int:
        return sum(self._rows) if mirrored == self._sums else self._rows[self.group.rank()]

    def _communicate(self, buffer: Tensor, rows: Tensor, mirrored: bool) -> Any:
        # gloo gathers and scatters equal parts only, but sends unequal ones: as many bytes.
        local, size = self._rows[self.group.rank()], self.group.size()
        equal = [local] * size
        if mirrored == self._sums:
            copies = rows.repeat(size, *[1] * (rows.dim() - 1))
            work = dist.all_to_all_single(buffer, copies, self._rows, equal, group=self.group, async_op=True)
            return _Handle(work, copies)
        parts = rows.new_empty((local * size, *rows.shape[1:]))
        work = dist.all_to_all_single(parts, rows, equal, self._rows, group=self.group, async_op=True)
        return _Handle(work, parts, sum_into=buffer)


class ReduceRows(GatherRows):
    """The mirror of `GatherRows`: rows are summed over ranks, each gets its part of the sums."""

    _sums = True


class _Handle:
    """A handle that keeps a tensor until it is waited for, and may add up what arrived in it."""

    def __init__(self, work: Any, kept: Tensor, *, sum_into: Tensor | None = None) -> None:
        self._work, self._kept, self._sums = work, kept, sum_into

    def wait(self) -> None:
        self._work.wait()
        if self._sums is not None and self._sums.numel():
            torch.sum(self._kept.view(-1, *self._sums.shape), 0, out=self._sums)


def _nothing() -> None:
    """Go on waiting."""


class _Launch(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.start(rows, mirrored=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.before_gradients()
        return ctx.exchange.finish(), None


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, buffer: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.finish()
        return buffer.view_as(buffer)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.start(gradients[0], mirrored=True)
        return gradients[0], None
