"""Lossless compression of bfloat16: sign and mantissa as they are, exponents in blocks.

Every bit pattern comes back as it was.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed_memory.exponent_blocks import BLOCK, Blocks, compress_exponents, restore_exponents


@dataclass(frozen=True)
class Compressed:
    """Numbers in compressed form.

    Attributes:
        rest: sign and mantissa, uint8 ``[n]``.
        exponents: in blocks of 64.
    """

    rest: Tensor
    exponents: Blocks

    @property
    def nbytes(self) -> int:
        """Return the bytes of all parts."""
        return sum(part.numel() for part in (self.rest, *self.exponents))


def compress(numbers: Tensor) -> Compressed:
    """Compress bfloat16 ``[n]``; ``n`` is a multiple of 64.

    Raises:
        ValueError: another dtype or number of elements.
    """
    if numbers.dtype is not torch.bfloat16 or numbers.dim() != 1 or numbers.numel() % BLOCK:
        raise ValueError(f"{numbers.dtype} {tuple(numbers.shape)}: bfloat16 [n] with n a multiple of {BLOCK}")
    bits = numbers.view(torch.int16)
    rest = ((bits >> 8) & 0x80 | bits & 0x7F).to(torch.uint8)
    return Compressed(rest, compress_exponents(((bits >> 7) & 0xFF).view(-1, BLOCK)))


def restore(compressed: Compressed, into: Tensor) -> Tensor:
    """Write the numbers into bfloat16 ``[n]``, and return it."""
    exponents = restore_exponents(compressed.exponents).flatten()
    rest = compressed.rest.short()
    into.view(torch.int16).copy_((rest & 0x80) << 8 | exponents << 7 | rest & 0x7F)
    return into
