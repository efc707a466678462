"""Biases of attention scores: a tensor, or a slope per head times a distance (Press et al., 2022)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

COMPRESSED_ROWS = 1024
"""Rows of a bias that depends on the distance only, when it is given in compressed form."""


@dataclass(frozen=True)
class Bias:
    """A bias of the scores, for any block of them.

    Attributes:
        tensor: ``[1 | b, n, sq | 1 | 1024, sk]``, or None. Of 1024 rows for more queries, they are the last
            ones of a bias that depends on the distance of query and key.
        factor: multiplies ``tensor``.
        slopes: ``[1 | b, n]`` float32, or None: the bias is ``-slope * |distance|``.
        root: the root of the distance instead.
        start: position of the first query minus that of the first key.
    """

    tensor: Tensor | None = None
    factor: float = 1.0
    slopes: Tensor | None = None
    root: bool = False
    start: int = 0

    def block(self, rows: tuple[int, int], columns: tuple[int, int], sq: int, sample: int | None) -> Tensor:
        """Return the bias of a block of scores, ``[1 | b, n, rows, columns]`` float32 or wider.

        Args:
            rows: queries, from and to (exclusive).
            columns: keys, from and to (exclusive).
            sq: number of queries of the sequence.
            sample: take only this one of the samples.
        """
        if self.slopes is not None:
            slopes = self.slopes if sample is None or self.slopes.shape[0] == 1 else self.slopes[sample, None]
            row = torch.arange(rows[0] + self.start, rows[1] + self.start, device=slopes.device)
            column = torch.arange(columns[0], columns[1], device=slopes.device)
            distance = (row.unsqueeze(1) - column).abs().to(slopes.dtype)
            if self.root:
                distance = distance.sqrt()
            return -slopes[..., None, None] * distance
        assert self.tensor is not None
        tensor = self.tensor
        if sample is not None and tensor.shape[0] > 1:
            tensor = tensor[sample : sample + 1]
        wide = torch.promote_types(tensor.dtype, torch.float32)
        if compressed(tensor, sq):
            part = _decompressed(tensor, rows, columns, sq)
        else:
            part = tensor if tensor.shape[2] == 1 else tensor[:, :, rows[0] : rows[1]]
            part = part[..., columns[0] : columns[1]]
        part = part.to(wide)
        return part if self.factor == 1.0 else part * self.factor


def compressed(tensor: Tensor, sq: int) -> bool:
    """Return whether a bias tensor holds only the last rows of one that depends on the distance."""
    return tensor.shape[2] == COMPRESSED_ROWS < sq


def _decompressed(tensor: Tensor, rows: tuple[int, int], columns: tuple[int, int], sq: int) -> Tensor:
    # The last row knows the bias of every distance from a query to a key that is not behind it; keys behind
    # it are masked in every mode that takes the compressed form.
    row = torch.arange(rows[0], rows[1], device=tensor.device).unsqueeze(1)
    column = torch.arange(columns[0], columns[1], device=tensor.device)
    distance = (row - column).clamp(min=0)
    return tensor[:, :, -1, :][..., (tensor.shape[3] - 1 - distance)]


def alibi_slopes(heads: int) -> list[float]:
    """Return the slope of every head.

    For a power of two ``p`` they are the powers ``1 .. p`` of ``2 ** (-8 / p)``; other numbers of heads take
    those of the power below, and the rest from every second one of the power above.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = _powers(power)
    return slopes + _powers(2 * power)[0::2][: heads - power]


def _powers(count: int) -> list[float]:
    base = 2.0 ** (-8.0 / count)
    return [base**exponent for exponent in range(1, count + 1)]
