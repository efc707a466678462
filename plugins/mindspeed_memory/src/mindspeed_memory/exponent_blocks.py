"""Exponents of floating-point numbers in as many bits as a block of them needs, without loss.

Exponents of numbers that belong together differ little. A block of 64 stores its smallest one and each
exponent's distance from it, in as many bits as the largest distance takes; zeros and denormals, whose
exponent is 0, have a code of their own and do not widen the block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 64
"""Numbers that share a smallest exponent."""
_PLANES = 8
_BYTES = BLOCK // 8


class Blocks(NamedTuple):
    """Exponents of ``m`` blocks, in at least 1.5 bytes each.

    Attributes:
        smallest: smallest exponent of each block that is not 0, uint8 ``[m]``.
        widths: bits of a code, of two blocks in a byte, uint8 ``[ceil(m / 2)]``.
        codes: bit planes of the codes, uint8; a block has as many planes of 8 bytes as bits.
    """

    smallest: Tensor
    widths: Tensor
    codes: Tensor


def compress_exponents(exponents: Tensor) -> Blocks:
    """Compress exponents from 0 to 255, ``[m, 64]`` of an integer type with 16 bits or more."""
    smallest = exponents.masked_fill(exponents == 0, 256).amin(1, keepdim=True).clamp_(max=255)
    codes = torch.where(exponents == 0, 0, exponents - smallest + 1).to(torch.uint8)
    widths = _widths(codes)
    kept = _planes(codes)[_used(widths)].flatten()
    return Blocks(smallest.flatten().to(torch.uint8), _nibbles(widths), kept)


def restore_exponents(blocks: Blocks) -> Tensor:
    """Return the exponents, int16 ``[m, 64]``."""
    smallest, packed, kept = blocks
    widths = torch.stack((packed & 15, packed >> 4), 1).flatten()[: smallest.numel()]
    planes = packed.new_zeros((smallest.numel(), _PLANES, _BYTES))
    planes[_used(widths)] = kept.view(-1, _BYTES)
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    codes = packed.new_zeros((smallest.numel(), BLOCK))
    for plane in range(_PLANES):
        codes |= (((planes[:, plane, :, None] >> shifts) & 1) << plane).view(-1, BLOCK)
    return torch.where(codes == 0, 0, codes.short() + smallest.short()[:, None] - 1)


def _widths(codes: Tensor) -> Tensor:
    """Return the bits that the codes of each block ``[m, 64]`` need, uint8 ``[m]``."""
    largest = codes.amax(1)
    widths = torch.zeros_like(largest)
    for plane in range(_PLANES):
        widths += (largest >> plane) > 0
    return widths


def _nibbles(widths: Tensor) -> Tensor:
    if widths.numel() % 2:
        widths = torch.cat((widths, widths.new_zeros(1)))
    pairs = widths.view(-1, 2)
    return pairs[:, 0] | pairs[:, 1] << 4


def _used(widths: Tensor) -> Tensor:
    """Return which of the planes ``[m, 8]`` are stored."""
    return torch.arange(_PLANES, device=widths.device) < widths[:, None]


def _planes(codes: Tensor) -> Tensor:
    """Return the bit planes ``[m, 8, 8]`` of codes ``[m, 64]``."""
    weights = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=codes.device)
    planes = [
        (((codes >> plane) & 1).view(-1, _BYTES, 8) * weights).sum(2, dtype=torch.uint8)
        for plane in range(_PLANES)
    ]
    return torch.stack(planes, 1)
