"""Visible keys of queries: bands around a diagonal, prefixes and mask tensors, for any block of rows.

The sparse modes are those of the fused attention kernels for Ascend devices:

==== ==================================================================================================
mode visible keys ``j`` of query ``i``, with ``o = Skv - Sq``
==== ==================================================================================================
0    not masked, and ``-pre <= j - i <= next``; everything when there is no mask tensor
1    not masked
2    ``j <= i``
3    ``j <= i + o``
4    ``-pre <= j - (i + o) <= next``
5    ``j <= i + o``, or ``j`` within the prefix of the sample
6    like 5
7    packed sequences: mode 4 for the last one, mode 3 for the others
8    packed sequences: mode 4 for the first one, mode 2 for the others
==== ==================================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

UNLIMITED = 2147483647
"""``pre`` and ``next`` of this size or more are no limit."""
MODES = tuple(range(9))


@dataclass(frozen=True)
class Visibility:
    """The ones of ``sk`` keys that each of ``sq`` queries sees.

    Attributes:
        sq: number of queries.
        sk: number of keys.
        offset: query ``i`` stands at the position ``i + offset`` of the keys.
        left: how many keys before its position a query sees; None is no limit, negative hides near ones.
        right: how many keys behind its position; None is no limit.
        prefix: per sample, how many leading keys every query sees besides.
        hidden: ``[1 | b, 1 | n, sq, sk]`` bool, True hides.
    """

    sq: int
    sk: int
    offset: int = 0
    left: int | None = None
    right: int | None = None
    prefix: tuple[int, ...] = ()
    hidden: Tensor | None = None

    @property
    def complete(self) -> bool:
        """Return whether every query sees every key."""
        return (
            self.hidden is None
            and (self.left is None or self.sq - 1 + self.offset <= self.left)
            and (self.right is None or self.sk - 1 - self.offset <= self.right)
        )

    @property
    def causal(self) -> bool:
        """Return whether query ``i`` sees the keys up to ``i``, no more and no less."""
        plain = self.hidden is None and not self.prefix and self.offset == 0
        unlimited = self.left is None or self.left >= self.sq - 1
        return plain and unlimited and self.right == 0

    @property
    def may_see_nothing(self) -> bool:
        """Return whether there may be queries that see no key."""
        if self.hidden is not None:
            return True
        before = self.right is not None and self.offset + self.right < 0
        behind = self.left is not None and self.sq - 1 + self.offset - self.left > self.sk - 1
        return before or behind

    def columns(self, start: int, end: int) -> tuple[int, int]:
        """Return the keys that queries ``start`` to ``end`` (exclusive) can see at all; may be empty."""
        first, last = 0, self.sk
        if self.left is not None:
            first = min(max(0, start + self.offset - self.left), self.sk)
        if self.right is not None:
            last = max(0, min(self.sk, end + self.offset + self.right))
        if self.prefix:
            first, last = 0, max(last, *self.prefix)
        return first, max(first, last)

    def limits(self, rows: tuple[int, int], columns: tuple[int, int]) -> tuple[bool, bool]:
        """Return whether a block has keys too far behind some of its queries, and too far ahead."""
        first, last = columns
        behind = self.left is not None and rows[1] - 1 + self.offset - self.left > first
        return behind, self.right is not None and rows[0] + self.offset + self.right < last - 1

    def block(self, rows: tuple[int, int], columns: tuple[int, int], device: torch.device) -> Tensor | None:
        """Return which keys are visible in a block; None when all are.

        Returns:
            ``[1 | b, 1 | n, rows, columns]`` bool, True is visible.
        """
        first, last = columns
        position = torch.arange(rows[0] + self.offset, rows[1] + self.offset, device=device).unsqueeze(1)
        key = torch.arange(first, last, device=device).unsqueeze(0)
        visible: Tensor | None = None
        behind, ahead = self.limits(rows, columns)
        if behind and self.left is not None:
            visible = key >= position - self.left
        if ahead and self.right is not None:
            before_right = key <= position + self.right
            visible = before_right if visible is None else visible & before_right
        if visible is not None:
            visible = visible[None, None]
            if self.prefix:
                leading = torch.tensor(self.prefix, device=device).view(-1, 1, 1, 1)
                visible = visible | (key < leading)
        if self.hidden is not None:
            shown = ~self.hidden[:, :, rows[0] : rows[1], first:last]
            visible = shown if visible is None else visible & shown
        return visible


def of_mode(
    mode: int,
    sq: int,
    sk: int,
    *,
    pre: int = UNLIMITED,
    following: int = UNLIMITED,
    prefix: tuple[int, ...] = (),
    hidden: Tensor | None = None,
) -> Visibility:
    """Return the visibility of a sparse mode for one sequence; 7 and 8 stand for their band.

    Args:
        mode: 0 to 8.
        sq: number of queries.
        sk: number of keys.
        pre: keys before the position, for bands.
        following: keys behind the position, for bands.
        prefix: per sample, the leading keys that are always visible, for modes 5 and 6.
        hidden: ``[1 | b, 1 | n, sq, sk]`` bool, True hides, for modes 0, 1 and 5.
    """
    left = None if pre >= UNLIMITED else pre
    right = None if following >= UNLIMITED else following
    offset = sk - sq
    if mode == 0:
        if hidden is None:
            return Visibility(sq, sk)
        return Visibility(sq, sk, 0, left, right, hidden=hidden)
    if mode == 1:
        return Visibility(sq, sk, hidden=hidden)
    if mode == 2:
        return Visibility(sq, sk, 0, None, 0)
    if mode == 3:
        return Visibility(sq, sk, offset, None, 0)
    if mode in (5, 6):
        return Visibility(sq, sk, offset, None, 0, prefix)
    return Visibility(sq, sk, offset, left, right)


def of_sequence(mode: int, index: int, filled: Sequence[int]) -> int:
    """Return the mode of one packed sequence; modes 7 and 8 single one out.

    Args:
        mode: 0 to 8.
        index: of the sequence.
        filled: indices of the sequences that have queries.
    """
    if mode == 7:
        return 4 if index == filled[-1] else 3
    if mode == 8:
        return 4 if index == filled[0] else 2
    return mode
