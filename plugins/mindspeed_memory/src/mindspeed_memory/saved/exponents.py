"""Lossless compression of bfloat16: sign and mantissa as they are, exponents in as few bits as a block needs.

Exponents of numbers that belong together differ little. A block of 64 stores its smallest one and each
exponent's distance from it, in as many bits as the largest distance takes; zeros and denormals, whose
exponent is 0, have a code of their own and do not widen the block. Every bit pattern comes back as it was.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 64
_PLANES = 8
_BYTES = BLOCK // 8


@dataclass(frozen=True)
class Compressed:
    """Numbers in compressed form.

    Attributes:
        rest: sign and mantissa, uint8 ``[n]``.
        smallest: smallest exponent of each block that is not 0, uint8 ``[n / 64]``.
        widths: bits of an exponent's code, of two blocks in a byte, uint8 ``[ceil(n / 128)]``.
        codes: bit planes of the codes, uint8; a block has as many planes of 8 bytes as bits.
    """

    rest: Tensor
    smallest: Tensor
    widths: Tensor
    codes: Tensor

    @property
    def nbytes(self) -> int:
        """Return the bytes of all parts."""
        return sum(part.numel() for part in (self.rest, self.smallest, self.widths, self.codes))


def compress(numbers: Tensor) -> Compressed:
    """Compress bfloat16 ``[n]``; ``n`` is a multiple of 64.

    Raises:
        ValueError: another dtype or number of elements.
    """
    if numbers.dtype is not torch.bfloat16 or numbers.dim() != 1 or numbers.numel() % BLOCK:
        raise ValueError(f"{numbers.dtype} {tuple(numbers.shape)}: bfloat16 [n] with n a multiple of {BLOCK}")
    bits = numbers.view(torch.int16)
    rest = ((bits >> 8) & 0x80 | bits & 0x7F).to(torch.uint8)
    exponents = ((bits >> 7) & 0xFF).view(-1, BLOCK)
    smallest = exponents.masked_fill(exponents == 0, 256).amin(1, keepdim=True).clamp_(max=255)
    codes = torch.where(exponents == 0, 0, exponents - smallest + 1).to(torch.uint8)
    widths = _widths(codes)
    return Compressed(
        rest, smallest.flatten().to(torch.uint8), _nibbles(widths), _planes(codes)[_used(widths)].flatten()
    )


def restore(compressed: Compressed, into: Tensor) -> Tensor:
    """Write the numbers into bfloat16 ``[n]``, and return it."""
    blocks = compressed.smallest.numel()
    packed = compressed.widths
    widths = torch.stack((packed & 15, packed >> 4), 1).flatten()[:blocks]
    planes = packed.new_zeros((blocks, _PLANES, _BYTES))
    planes[_used(widths)] = compressed.codes.view(-1, _BYTES)
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    codes = packed.new_zeros((blocks, BLOCK))
    for plane in range(_PLANES):
        codes |= (((planes[:, plane, :, None] >> shifts) & 1) << plane).view(blocks, BLOCK)
    exponents = torch.where(codes == 0, 0, codes.short() + compressed.smallest.short()[:, None] - 1).flatten()
    rest = compressed.rest.short()
    into.view(torch.int16).copy_((rest & 0x80) << 8 | exponents << 7 | rest & 0x7F)
    return into


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
