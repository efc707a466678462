"""Float32 numbers in 16 or 8 bits each, with a scale for every block of 128.

A scale is a power of two, kept as its exponent in one byte. It is the smallest one with which the largest
number of the block is in the format's range. Multiplying by it is exact, and the rounded block asks for the
same scale again, or for half of it, with which the format has the same numbers: encoding what was decoded
changes nothing.

Blocks begin at multiples of 128 of the flattened parameter of the model, not of the part that a rank has of
it. So two ranks that share a parameter encode it as one rank does, but for the block that lies on both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_optim.e4m3 import from_e4m3, to_e4m3

BLOCK = 128
"""Numbers that share a scale."""
CHUNK = 2**22
"""Most numbers that are decoded at a time."""
_BIAS, _MANTISSA_BITS = 127, 23
_LARGEST_FINITE = 0x7F7FFFFF


@dataclass(frozen=True)
class BlockFormat:
    """A floating-point format whose range blocks are scaled into.

    Attributes:
        dtype: of the stored numbers.
        top: exponent of the largest power of two in its range.
        carry: added to the bits of a float32 number, it raises the exponent where the number, scaled by
            ``top``, would be rounded out of range.
        lowest: the smallest exponent of a scale. What the format resolves with it is a normal float32 number.
    """

    dtype: torch.dtype
    top: int
    carry: int
    lowest: int


FLOAT16 = BlockFormat(torch.float16, top=15, carry=0x1000, lowest=-102)
"""Largest number 65504; 65520 would be rounded to infinity."""
E4M3 = BlockFormat(torch.uint8, top=8, carry=0x1FFFFF, lowest=-117)
"""Codes of e4m3, largest number 448; what grows past it in small steps has to find a code above it."""
E4M3_ROOT = BlockFormat(torch.uint8, top=8, carry=0x1FFFFF, lowest=-54)
"""Codes of square roots: the square of the smallest one is a normal float32 number."""


class BlockFloats(NamedTuple):
    """Encoded numbers of a flat tensor; a named tuple, so that measurements find its tensors.

    Attributes:
        numbers: ``[n]``, scaled.
        exponents: int8 ``[blocks]``, of the scales.
        lead: elements of the first block that lie before the first number, in ``0 .. 127``.
        form: the format.
    """

    numbers: Tensor
    exponents: Tensor
    lead: int
    form: BlockFormat

    @classmethod
    def zeros(cls, size: int, device: torch.device, form: BlockFormat, start: int = 0) -> BlockFloats:
        """Return zeros.

        Args:
            size: how many.
            device: where.
            form: the format.
            start: place of the first number in the flattened parameter.
        """
        lead = start % BLOCK
        numbers = torch.zeros(size, dtype=form.dtype, device=device)
        blocks = -(-(lead + size) // BLOCK) if size else 0
        return cls(numbers, torch.full((blocks,), form.lowest, dtype=torch.int8, device=device), lead, form)

    def read(self, start: int, stop: int) -> Tensor:
        """Return the numbers of a range in float32, in memory of their own.

        Args:
            start: 0, or where a block begins.
            stop: the end, or where a block begins.
        """
        first, lead = divmod(self.lead + start, BLOCK)
        exponents = self.exponents[first : -(-(self.lead + stop) // BLOCK)]
        found = self.numbers[start:stop]
        values = from_e4m3(found) if found.dtype == torch.uint8 else found.float()
        return values.mul_(_scales(exponents, lead, stop - start))

    def write(self, start: int, stop: int, values: Tensor, bits: Tensor | None = None) -> None:
        """Overwrite the numbers of a range.

        Args:
            start: 0, or where a block begins.
            stop: the end, or where a block begins.
            values: ``[stop - start]`` float32.
            bits: random, int32 ``[stop - start]``, to round codes stochastically; by default to nearest.
        """
        first, lead = divmod(self.lead + start, BLOCK)
        exponents = block_exponents(values, lead, self.form)
        self.exponents[first : first + exponents.numel()] = exponents
        scaled = values * _scales(-exponents, lead, values.numel())
        self.numbers[start:stop] = to_e4m3(scaled, bits) if self.form.dtype == torch.uint8 else scaled

    def ranges(self, limit: int = CHUNK) -> Iterator[tuple[int, int]]:
        """Yield ranges of whole blocks that make up all numbers, of at most ``limit`` each."""
        return block_ranges(self.numbers.numel(), self.lead, limit)

    def whole(self) -> Tensor:
        """Return all numbers in float32."""
        return self.read(0, self.numbers.numel())

    def fill(self, values: Tensor) -> None:
        """Overwrite all numbers, rounded to nearest.

        Args:
            values: ``[n]``, of any dtype and device.
        """
        for start, stop in self.ranges():
            self.write(start, stop, values[start:stop].to(self.numbers.device, torch.float32))


def block_exponents(values: Tensor, lead: int, form: BlockFormat) -> Tensor:
    """Return the exponent of the scale of each block.

    Args:
        values: ``[n]`` float32.
        lead: elements of the first block that lie before them.
        form: the format.

    Returns:
        int8 ``[blocks]``. Infinities and NaNs count as the largest finite number.
    """
    magnitudes = F.pad(values.abs(), (lead, -(lead + values.numel()) % BLOCK))
    bits = magnitudes.view(-1, BLOCK).amax(1).view(torch.int32).clamp_(max=_LARGEST_FINITE)
    exponents = ((bits + form.carry) >> _MANTISSA_BITS).sub_(_BIAS + form.top)
    return exponents.clamp_(min=form.lowest).to(torch.int8)


def block_ranges(size: int, lead: int, limit: int) -> Iterator[tuple[int, int]]:
    """Yield ranges that begin and end where blocks do, or at the ends of ``size`` numbers.

    Args:
        size: numbers.
        lead: elements of the first block that lie before them.
        limit: most numbers of a range, at least a block.
    """
    start = 0
    while start < size:
        stop = min(size, (lead + start + limit) // BLOCK * BLOCK - lead)
        yield start, stop
        start = stop


def _scales(exponents: Tensor, lead: int, size: int) -> Tensor:
    """Return two to the power of a block's exponent for each number, float32 ``[size]``."""
    powers = ((exponents.to(torch.int32) + _BIAS) << _MANTISSA_BITS).view(torch.float32)
    return powers[:, None].expand(-1, BLOCK).reshape(-1)[lead : lead + size]
