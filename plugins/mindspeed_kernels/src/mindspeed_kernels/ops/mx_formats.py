"""Rounding to MX formats: 32 numbers behind one another have few bits and an exponent that they share.

The shared exponent is that of the largest number, less the largest of the format, as OCP's Microscaling
formats say; what is above the largest number then becomes the largest. Arithmetic is that of float32 on its
bits, so that it is exact and needs no device that knows the formats.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mindspeed_kernels.ops.row_groups import bounds

BLOCK = 32
"""Numbers that share an exponent."""
_LEAST_EXPONENT, _EXPONENT_OF_INF = -127, 128


class Format(NamedTuple):
    """A float of 8 or 4 bits.

    Attributes:
        dtype: torch's; None for 4 bits, which torch keeps in pairs only.
        bits: of the mantissa.
        least_exponent: of its normal numbers.
        most_exponent: of its largest number.
        largest: that number.
    """

    dtype: torch.dtype | None
    bits: int
    least_exponent: int
    most_exponent: int
    largest: float


E4M3 = Format(torch.float8_e4m3fn, 3, -6, 8, 448.0)
E5M2 = Format(torch.float8_e5m2, 2, -14, 15, 57344.0)
E2M1 = Format(None, 1, 0, 2, 6.0)


def mx_rounded(x: Tensor, axis: int, form: Format) -> Tensor:
    """Round blocks of 32 numbers along an axis; the last block may be shorter.

    Args:
        x: half precision or float32.
        axis: along which numbers share exponents.
        form: of each number.

    Returns:
        Float32 in the shape of ``x``. A block with an infinite number or NaN is NaN; one whose shared
        exponent would be below -126 is zero.
    """
    wide = x.float().movedim(axis, -1)
    if not wide.numel():
        return x.float()
    length = wide.shape[-1]
    blocks = F.pad(wide, (0, -length % BLOCK)).unflatten(-1, (-1, BLOCK))
    highest = _exponents(blocks.abs().amax(-1, keepdim=True))
    shared = highest - form.most_exponent
    factor = shared.clamp(min=_LEAST_EXPONENT + 1)
    scaled = blocks * _powers_of_two(-factor)
    step = _powers_of_two(
        _exponents(scaled).clamp(min=form.least_exponent, max=form.most_exponent) - form.bits
    )
    rounded = ((scaled / step).round() * step).clamp(-form.largest, form.largest) * _powers_of_two(factor)
    rounded = rounded.masked_fill(shared <= _LEAST_EXPONENT, 0.0)
    rounded = rounded.masked_fill(highest == _EXPONENT_OF_INF, float("nan"))
    return rounded.flatten(-2)[..., :length].movedim(-1, axis)


def mx_rounded_groups(x: Tensor, ends: Tensor, form: Format) -> Tensor:
    """Round blocks of 32 rows ``[m, n]``, which begin anew with every group of rows that ``ends`` tells."""
    return torch.cat([mx_rounded(x[start:end], 0, form) for start, end in bounds(ends)])


def _exponents(x: Tensor) -> Tensor:
    """Return int32 exponents of float32 numbers, -127 below normal ones and 128 of infinity and NaN."""
    return ((x.contiguous().view(torch.int32) >> 23) & 0xFF) + _LEAST_EXPONENT


def _powers_of_two(exponents: Tensor) -> Tensor:
    """Return ``2**e`` in float32 for int32 exponents from -126 to 127."""
    return ((exponents - _LEAST_EXPONENT) << 23).view(torch.float32)
