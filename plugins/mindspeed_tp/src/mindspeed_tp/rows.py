"""Rows of a tensor spread over the ranks of a group, in equal parts or in unequal ones.

Unequal parts travel padded to the largest one, so that the collectives of equal parts carry them and nobody
has to ask for the length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed_tp.partition import Partition

Pending = Callable[[], Tensor]
"""Waits for a collective and returns its result."""


@dataclass(frozen=True)
class Rows:
    """A group and the parts in which its ranks hold the first dimension.

    Attributes:
        group: the process group.
        parts: of the first dimension; None where they are equal.
    """

    group: ProcessGroup
    parts: Partition | None = None

    @property
    def even(self) -> bool:
        """Return whether all ranks hold equally many rows."""
        return self.parts is None or self.parts.even

    def times(self, factor: int) -> Rows:
        """Return the same for rows of which each stands for ``factor`` of those here."""
        return self if self.even else Rows(self.group, self.parts and self.parts.times(factor))

    def start_gather(self, x: Tensor) -> Pending:
        """Start to gather the parts ``[m_r, ...]`` of all ranks into ``[m, ...]``."""
        ranks = self.group.size()
        if self.even or self.parts is None:
            whole = x.new_empty(ranks * x.shape[0], *x.shape[1:])
            work = dist.all_gather_into_tensor(whole, x.contiguous(), group=self.group, async_op=True)
            return _waiting(work, lambda: whole)
        parts = self.parts
        padded = _padded(x, parts.largest)
        whole = x.new_empty(ranks * parts.largest, *x.shape[1:])
        work = dist.all_gather_into_tensor(whole, padded, group=self.group, async_op=True)

        def cut() -> Tensor:
            blocks = whole.chunk(ranks)
            return torch.cat([block[:size] for block, size in zip(blocks, parts.sizes, strict=True)])

        return _waiting(work, cut, padded)

    def start_scatter(self, x: Tensor) -> Pending:
        """Start to sum ``[m, ...]`` over the ranks and to leave each its part ``[m_r, ...]``."""
        ranks = self.group.size()
        if self.even or self.parts is None:
            result = x.new_empty(x.shape[0] // ranks, *x.shape[1:])
            sent = x.contiguous()
            work = dist.reduce_scatter_tensor(result, sent, group=self.group, async_op=True)
            return _waiting(work, lambda: result, sent)
        parts = self.parts
        padded = torch.cat([_padded(block, parts.largest) for block in x.split(parts.sizes)])
        result = x.new_empty(parts.largest, *x.shape[1:])
        work = dist.reduce_scatter_tensor(result, padded, group=self.group, async_op=True)
        size = parts.sizes[self.group.rank()]
        return _waiting(work, lambda: result[:size].contiguous(), padded)


def start_sum(x: Tensor, group: ProcessGroup) -> Pending:
    """Start to sum ``x`` over a group, in place."""
    work = dist.all_reduce(x, group=group, async_op=True)
    return _waiting(work, lambda: x)


def _waiting(work: dist.Work | None, result: Callable[[], Tensor], *held: Tensor) -> Pending:
    """Return what waits and gives the result; ``held`` stays alive until then."""

    def wait() -> Tensor:
        if work is not None:
            work.wait()
        return result()

    wait.__dict__["held"] = held
    return wait


def _padded(x: Tensor, rows: int) -> Tensor:
    if x.shape[0] == rows:
        return x.contiguous()
    padded = x.new_zeros(rows, *x.shape[1:])
    padded[: x.shape[0]] = x
    return padded
