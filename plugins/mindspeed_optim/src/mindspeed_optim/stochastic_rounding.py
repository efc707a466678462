"""Rounding to fewer bits that is right on average.

An average with a factor of 0.999 moves by a thousandth per update, which is less than half of the distance
between two numbers of 16 or 8 bits: rounded to nearest, it would stay where it is. Rounded up with a probability
of how far it lies above the lower neighbour, it moves as often as it should.

The random bits of a number depend on the step and on its place in the parameter of the model, and on nothing
else. So replicas of a parameter stay the same, whoever shards them however, and a resumed run goes on exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0x85EBCA6B, 0xC2B2AE35)
"""Of the finalizer of MurmurHash3 for 32 bits."""
_ALL = 0xFFFFFFFF
_LOST = 0xFFFF
"""Bits of a float32 number that bfloat16 has not."""


def random_bits(key: int, start: int, size: int, device: torch.device) -> Tensor:
    """Return random bits for a range of the numbers of a parameter.

    Args:
        key: of what is rounded; see `key_of`.
        start: place of the first number in the flattened parameter.
        size: how many.
        device: where.

    Returns:
        int32 ``[size]``, all bits random.
    """
    bits = torch.arange(size, dtype=torch.int32, device=device) + _signed(start + key)
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
