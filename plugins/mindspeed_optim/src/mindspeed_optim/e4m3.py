"""Numbers of 8 bits with 4 bits of exponent and 3 of mantissa (e4m3fn), by integer arithmetic.

The format of ``torch.float8_e4m3fn``: up to 448, no infinity. Devices without casts to 8 bits (Ascend 910B,
GPUs before Ada) have integers, and rounding may be stochastic.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST, SMALLEST = 448.0, 2.0**-9
"""The largest number, and the smallest positive one."""
_SMALLEST_NORMAL = 2.0**-6
_LOST = 20
"""Bits of a float32 mantissa that the format has not."""
_NORMAL, _DENORMAL = 120 << 3, 121 << 3
"""Upper bits of a float32 number minus the code of the same number, and of one that lies 2^-6 below it."""
_LARGEST_CODE, _NAN, _SIGN = 0x7E, 0x7F, 0x80


def to_e4m3(values: Tensor, bits: Tensor | None = None) -> Tensor:
    """Round float32 numbers to codes.

    Args:
        values: float32; what is larger than `LARGEST` becomes the largest, infinities and NaNs become NaN.
        bits: random, int32, in the shape of the values: round up with a probability of how far a number lies
            above its lower neighbour. By default to nearest, ties to even.

    Returns:
        Codes, uint8.
    """
    magnitudes = values.abs()
    # Below the smallest normal number codes lie as far apart as float32 numbers of 3 bits right above it.
    small = magnitudes < _SMALLEST_NORMAL
    number = (magnitudes + small * _SMALLEST_NORMAL).view(torch.int32)
    lost = (1 << _LOST) - 1
    number = number + ((number >> _LOST) & 1) + (lost >> 1) if bits is None else number + (bits & lost)
    codes = ((number >> _LOST) - torch.where(small, _DENORMAL, _NORMAL)).clamp_(max=_LARGEST_CODE)
    codes = torch.where(values.isfinite(), codes, _NAN)
    return (codes + (values.signbit() * _SIGN)).to(torch.uint8)


def from_e4m3(codes: Tensor) -> Tensor:
    """Return the float32 numbers of codes, uint8."""
    magnitudes = (codes & ~_SIGN & 0xFF).to(torch.int32)
    normal = ((magnitudes + _NORMAL) << _LOST).view(torch.float32)
    values = torch.where(magnitudes < 8, magnitudes * SMALLEST, normal)
    values = torch.where(magnitudes == _NAN, torch.nan, values)
    return torch.where(codes >= _SIGN, -values, values)
