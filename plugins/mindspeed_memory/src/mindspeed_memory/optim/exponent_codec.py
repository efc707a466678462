"""Float32 numbers in fewer bytes, without loss: signs and mantissas as they are, exponents in blocks.

Any bit pattern comes back: NaNs with their payloads, infinities, minus zero. The worst case is 3/512 larger
than the numbers.
"""

from __future__ import annotations

import torch

from mindspeed_memory.exponent_blocks import BLOCK, Blocks, compress_exponents, restore_exponents

_MANTISSA, _SIGN = 0x7FFFFF, 0x800000
_PLAIN = 3
"""Bytes of sign and mantissa."""


def encode(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers in fewer bytes.

    Args:
        numbers: ``[n]`` float32.

    Returns:
        Bytes, uint8: signs and mantissas ``[blocks * 64 * 3]``, then the parts of `Blocks`.
    """
    bits = torch.nn.functional.pad(numbers, (0, -numbers.numel() % BLOCK)).view(torch.int32)
    plain = ((bits >> 8) & _SIGN) | (bits & _MANTISSA)
    kept = plain.view(torch.uint8).view(-1, 4)[:, :_PLAIN].reshape(-1)
    return torch.cat([kept, *compress_exponents(((bits >> 23) & 0xFF).view(-1, BLOCK))])


def decode(encoded: torch.Tensor, out: torch.Tensor) -> None:
    """Write the numbers that `encode` was given.

    Args:
        encoded: bytes of `encode`.
        out: ``[n]`` float32, as many as there were.
    """
    blocks = -(-out.numel() // BLOCK)
    sizes = [blocks * BLOCK * _PLAIN, blocks, -(-blocks // 2)]
    plain, smallest, widths, codes = encoded.split([*sizes, encoded.numel() - sum(sizes)])
    exponents = restore_exponents(Blocks(smallest, widths, codes)).view(-1).to(torch.int32)
    bits = torch.zeros(blocks * BLOCK, 4, dtype=torch.uint8, device=out.device)
    bits[:, :_PLAIN] = plain.view(-1, _PLAIN)
    number = bits.view(torch.int32).view(-1)
    number = ((number & _SIGN) << 8) | (exponents << 23) | (number & _MANTISSA)
    out.copy_(number.view(torch.float32)[: out.numel()])
