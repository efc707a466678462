"""The interface of block kernels: attention of some rows to some keys, with its log-sum-exp.

Forward gives the block's own output and log-sum, which are joined with those of other blocks. Backward takes
the *whole* attention's output and log-sum, which makes the gradients of separate blocks add up exactly:
a kernel must offer a backward that believes the log-sum it is given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_cp.engine.scores import Scores
from mindspeed_cp.engine.tasks import Task


@dataclass(frozen=True)
class Case:
    """The properties of a task that decide whether a kernel can compute it.

    Attributes:
        kind: of the task, see `mindspeed_cp.engine.masks`.
        band: a task with a mask whose mask is a band around a diagonal.
        square: as many rows as columns.
        device: type of the device.
        dtype: of queries, keys and values.
        heads: of queries.
        key_heads: of keys and values; divides ``heads``.
        width: of queries and keys.
        value_width: of values.
        bias: there is a bias by distance.
        dropout: attention weights are dropped.
    """

    kind: str
    band: bool
    square: bool
    device: str
    dtype: torch.dtype
    heads: int
    key_heads: int
    width: int
    value_width: int
    bias: bool
    dropout: bool


class BackwardBlock(NamedTuple):
    """A block whose gradients are computed, with the results of the whole attention.

    Attributes:
        outer: ``[b, n, s, dv]``, the gradient of the whole attention's output.
        q: ``[b, n, s, d]``, as in forward, like ``k``, ``v``, ``task`` and ``scores``.
        k: ``[b, g, t, d]``.
        v: ``[b, g, t, dv]``.
        output: ``[b, n, s, dv]``, of the whole attention.
        logsum: ``[b, n, s]``, of the whole attention; finite: any number for rows that see no key at all.
        task: kind and global positions.
        scores: scale, mask rule, bias, dropout.
    """

    outer: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    output: Tensor
    logsum: Tensor
    task: Task
    scores: Scores


class BlockKernel(ABC):
    """One implementation of the attention of blocks.

    Attributes:
        name: unique.
        devices: types of the devices it runs on; ``"*"`` is every one.
        priority: the highest of those that can is chosen; matrix products have -100.
    """

    name: str
    devices: tuple[str, ...] = ("*",)
    priority: int = 0

    def missing(self) -> str:
        """Return why it cannot run in this process; empty when it can."""
        return ""

    def refusal(self, case: Case) -> str:
        """Return why it cannot compute tasks of a case on one of its devices; empty when it can."""
        return ""

    def parts(self, task: Task, scores: Scores, heads: int) -> Sequence[Task]:
        """Cut a task into the pieces that it computes at once, each score in exactly one of them.

        Args:
            task: rows, columns and kind.
            scores: mask rule, bias, dropout.
            heads: samples times query heads, for bounding memory.
        """
        return (task,)

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, task: Task, scores: Scores) -> tuple[Tensor, Tensor]:
        """Compute attention of the rows of a task to its columns.

        Args:
            q: ``[b, n, s, d]``, the rows of the task; not necessarily contiguous, like ``k`` and ``v``.
            k: ``[b, g, t, d]``, the columns, of as many or fewer heads that divide ``n``.
            v: ``[b, g, t, dv]``.
            task: kind and global positions.
            scores: scale, mask rule, bias, dropout.

        Returns:
            The output ``[b, n, s, dv]`` and the natural logarithm of the summed exponentials ``[b, n, s]``,
            at least float32: zeros and minus infinity for rows that see none of these columns.
        """

    @abstractmethod
    def backward(self, block: BackwardBlock) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values of a block, in any floating dtype."""
