"""Rounding to fewer bits that is right on average.

An average with a factor of 0.999 moves by a thousandth per update, which is less than half of the distance
between two numbers of 16 or 8 bits: rounded to nearest, it would stay where it is. Rounded up with a
probability of how far it lies above the lower neighbour, it moves as often as it should.

The random bits of a number depend on the step and on its place in the whole parameter, and on nothing else.
So replicas of a parameter stay the same, whoever shards them however, layouts round alike, and a resumed run
goes on exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_core import ParameterPart

_MULTIPLIERS = (0x85EBCA6B, 0xC2B2AE35)
"""Of the finalizer of MurmurHash3 for 32 bits."""
_ALL = 0xFFFFFFFF
_LOST = 0xFFFF
"""Bits of a float32 number that bfloat16 has not."""


class Place(NamedTuple):
    """Place of a part of a parameter in the whole, all tensor-parallel ranks together.

    Attributes:
        start: first element in the flattened parameter of this tensor-parallel rank.
        run: elements that follow one another in the whole too; 0 for all of them.
        ranks: tensor-parallel ranks that cut the parameter.
        rank: this one's number.
    """

    start: int = 0
    run: int = 0
    ranks: int = 1
    rank: int = 0

    @classmethod
    def of(cls, part: ParameterPart | None) -> Place:
        """Return the place of what a rank updates of a parameter."""
        if part is None or part.tensor_parallel_dim is None or part.tensor_parallel_group is None:
            return cls(0 if part is None else part.start)
        group = part.tensor_parallel_group
        return cls(part.start, part.shape[part.tensor_parallel_dim :].numel(), group.size(), group.rank())

    def elements(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Return the places of a range of the part's elements in the whole, int64 ``[stop - start]``."""
        found = torch.arange(self.start + start, self.start + stop, dtype=torch.int64, device=device)
        if self.ranks > 1:
            found += found // self.run * (self.run * (self.ranks - 1)) + self.rank * self.run
        return found


def random_bits(key: int, elements: Tensor) -> Tensor:
    """Return random bits for elements of a parameter.

    Args:
        key: of what is rounded; see `key_of`.
        elements: places of the elements in the whole parameter, int64.

    Returns:
        int32 in the shape of ``elements``, all bits random.
    """
    bits = ((elements + key) & _ALL).sub_(1 << 31).to(torch.int32)
    for shift, multiplier in zip((16, 13), _MULTIPLIERS):
        bits ^= _shifted(bits, shift)
        bits *= _signed(multiplier)
    bits ^= _shifted(bits, 16)
    return bits


def key_of(step: int, stream: int) -> int:
    """Return the key of what is rounded in a step.

    Args:
        step: number of the update.
        stream: a number for each kind of state that is rounded in it.
    """
    number = (step * 2 + stream) & _ALL
    for shift, multiplier in zip((16, 13), _MULTIPLIERS):
        number = (number ^ number >> shift) * multiplier & _ALL
    return number ^ number >> 16


def rounded_to_bfloat16(values: Tensor, bits: Tensor) -> Tensor:
    """Round float32 numbers to those that bfloat16 has; infinities and NaNs stay.

    Args:
        values: float32.
        bits: random, int32, in the shape of the values.

    Returns:
        float32 numbers that a cast to bfloat16 keeps.
    """
    rounded = ((values.view(torch.int32) + (bits & _LOST)) & ~_LOST).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values)


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Shift to the right as unsigned numbers."""
    return (bits >> count) & ((1 << (32 - count)) - 1)


def _signed(number: int) -> int:
    """Return the signed number of 32 bits with the same bits."""
    number &= _ALL
    return number - (1 << 32) if number >> 31 else number
