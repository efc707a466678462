"""One attention besides its tensors: sequences, scale, bias, dropped weights; and its blocks.

An attention without a score matrix is computed block by block of queries. Here is what such a block sees and
what is added to its scores; the kernels that compute it are in `block_kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mindspeed_kernels.attention.bias import Bias
from mindspeed_kernels.attention.visibility import Visibility

_MASK_ELEMENTS = 1 << 20
_SCORE_ELEMENTS = 1 << 20
_MOST_ROWS = 256
_FEWEST_ROWS = 16


@dataclass(frozen=True)
class Piece:
    """One sequence: a range of queries that attends to a range of keys.

    Attributes:
        rows: queries, from and to (exclusive).
        columns: keys, from and to.
        visibility: which keys they see.
        sample: which sample of a bias belongs to the sequence, None for all at once.
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
    visibility: Visibility
    sample: int | None = None


@dataclass(frozen=True)
class AttentionCall:
    """Everything about an attention besides queries, keys and values.

    Attributes:
        pieces: the sequences.
        scale: factor of the scores.
        bias: added to the scores.
        keep: probability of keeping an attention weight.
        seed: of the dropped weights.
        kept: ``[b, n, sq, sk]`` bool, the weights to keep instead of random ones.
    """

    pieces: tuple[Piece, ...]
    scale: float
    bias: Bias | None = None
    keep: float = 1.0
    seed: int = 0
    kept: Tensor | None = field(default=None)

    @property
    def drops(self) -> bool:
        """Return whether attention weights are dropped."""
        return self.keep < 1.0 or self.kept is not None


@dataclass(frozen=True)
class Block:
    """Queries and keys of one call of a kernel.

    Attributes:
        piece: the sequence they belong to.
        rows: queries, from and to, counted in the sequence.
        columns: keys, from and to, counted in the sequence.
        causal: the kernel hides what is above the diagonal itself.
        whole: nothing has to be hidden or added besides.
        number: position among all blocks, for random numbers.
    """

    piece: Piece
    rows: tuple[int, int]
    columns: tuple[int, int]
    causal: bool
    whole: bool
    number: int

    @property
    def shape(self) -> tuple[object, ...]:
        """Return everything that decides which operations the block takes, and on how many elements."""
        rows, columns = (interval[1] - interval[0] for interval in (self.rows, self.columns))
        limits = () if self.whole else self.piece.visibility.limits(self.rows, self.columns)
        return id(self.piece), rows, columns, self.causal, self.whole, limits

    def of_rows(self, tensor: Tensor) -> Tensor:
        """Return the block's queries of ``[b, n, sq, ...]``."""
        first = self.piece.rows[0]
        return tensor[:, :, first + self.rows[0] : first + self.rows[1]]

    def of_columns(self, tensor: Tensor) -> Tensor:
        """Return the block's keys of ``[b, g, sk, ...]``."""
        first = self.piece.columns[0]
        return tensor[:, :, first + self.columns[0] : first + self.columns[1]]


@dataclass(frozen=True)
class Mask:
    """Addend of a block's scores, and the rows that see nothing; each may be None."""

    added: Tensor | None = None
    empty: Tensor | None = None


def blocks_of(attention: AttentionCall, heads: int, flash: bool) -> list[Block]:
    """Return the blocks of queries that are computed one by one; those that see nothing are left out.

    Args:
        attention: sequences, scale, bias, dropped weights.
        heads: number of heads of the queries.
        flash: whether a flash kernel computes them, which hides what is above the diagonal by itself.
    """
    found: list[Block] = []
    for piece in attention.pieces:
        seen = piece.visibility
        whole = attention.bias is None and flash and (seen.complete or seen.causal)
        step = max(1, seen.sq) if whole else _rows(attention, seen, heads, flash)
        for start in range(0, seen.sq, step):
            rows = (start, min(start + step, seen.sq))
            columns = (0, seen.sk) if whole else seen.columns(*rows)
            if columns[0] < columns[1]:
                causal = whole and not seen.complete
                found.append(Block(piece, rows, columns, causal, whole, len(found)))
    return found


def _rows(attention: AttentionCall, seen: Visibility, heads: int, flash: bool) -> int:
    """Return how many queries a block has, so that its mask or its scores stay small."""
    per_head = attention.bias is not None or (seen.hidden is not None and seen.hidden.shape[1] > 1)
    budget = _MASK_ELEMENTS if flash else _SCORE_ELEMENTS
    width = max(1, seen.sk * (heads if per_head or not flash else 1))
    return max(_FEWEST_ROWS, min(_MOST_ROWS, budget // width))


def mask_of(attention: AttentionCall, block: Block, device: torch.device) -> Mask:
    """Build the mask of a block; blocks make theirs one at a time, since all of them would be large."""
    if block.whole:
        return Mask()
    seen, bias = block.piece.visibility, None
    visible = seen.block(block.rows, block.columns, device)
    if attention.bias is not None:
        bias = attention.bias.block(block.rows, block.columns, seen.sq, block.piece.sample)
    if visible is None:
        return Mask(bias)
    empty = ~visible.any(-1) if seen.may_see_nothing else None
    if bias is None:
        zero = torch.zeros((), dtype=torch.float32, device=device)
        return Mask(torch.where(visible, zero, float("-inf")), empty)
    return Mask(bias.masked_fill(~visible, float("-inf")), empty)
