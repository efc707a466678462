"""Float32 numbers in fewer bytes, without loss: exponents in as many bits as they need.

Signs and mantissas stay as they are.

Numbers that belong together have exponents close to each other. For every 64 of them the smallest exponent
is kept, and the distance of each from it in the fewest bits that hold the largest; zeros and denormal
numbers have a code of their own, so that a single zero among ordinary numbers costs nothing. Any bit pattern
comes back: NaNs with their payloads, infinities, minus zero. The worst case is 1/128 larger than the numbers.
"""

from __future__ import annotations

import torch

GROUP = 64
"""Numbers that share an exponent to count from."""
_MANTISSA, _SIGN = 0x7FFFFF, 0x800000
_NONE = 256
_PLAIN = 3
"""Bytes of sign and mantissa."""


def encode(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers in fewer bytes.

    Args:
        numbers: ``[n]`` float32.

    Returns:
        Bytes, uint8: signs and mantissas ``[groups * 64 * 3]``, smallest exponents ``[groups]``, numbers of
        bits ``[groups]``, and for each bit 8 bytes of every group that has it.
    """
    padding = -numbers.numel() % GROUP
    bits = torch.nn.functional.pad(numbers, (0, padding)).view(torch.int32)
    plain = ((bits >> 8) & _SIGN) | (bits & _MANTISSA)
    exponents = ((bits >> 23) & 0xFF).view(-1, GROUP)
    smallest = torch.where(exponents == 0, _NONE, exponents).amin(1, keepdim=True)
    codes = torch.where(exponents == 0, 0, exponents - smallest + 1)
    most = codes.amax(1)
    widths = torch.zeros_like(most)
    for width in range(8):
        widths += most >= 2**width
    planes = [_packed((codes[widths > bit] >> bit) & 1) for bit in range(8)]
    heads = [(smallest.view(-1) & 0xFF).to(torch.uint8), widths.to(torch.uint8)]
    kept = plain.view(torch.uint8).view(-1, 4)[:, :_PLAIN].reshape(-1)
    return torch.cat([kept, *heads, *planes])


def decode(encoded: torch.Tensor, out: torch.Tensor) -> None:
    """Write the numbers that `encode` was given.

    Args:
        encoded: bytes of `encode`.
        out: ``[n]`` float32, as many as there were.
    """
    groups = -(-out.numel() // GROUP)
    plain, smallest, widths, planes = encoded.split(
        [groups * GROUP * _PLAIN, groups, groups, encoded.numel() - groups * (GROUP * _PLAIN + 2)]
    )
    codes = torch.zeros(groups, GROUP, dtype=torch.int32, device=out.device)
    start = 0
    for bit in range(8):
        present = widths > bit
        count = int(present.sum())
        if not count:
            break
        end = start + count * (GROUP // 8)
        codes[present] |= _unpacked(planes[start:end]) << bit
        start = end
    exponents = torch.where(codes == 0, 0, codes + (smallest.to(torch.int32) - 1).view(-1, 1)).view(-1)
    bits = torch.zeros(groups * GROUP, 4, dtype=torch.uint8, device=out.device)
    bits[:, :_PLAIN] = plain.view(-1, _PLAIN)
    number = bits.view(torch.int32).view(-1)
    number = ((number & _SIGN) << 8) | (exponents << 23) | (number & _MANTISSA)
    out.copy_(number.view(torch.float32)[: out.numel()])


def _packed(bits: torch.Tensor) -> torch.Tensor:
    """Return ``[k, 64]`` bits as ``[8 k]`` bytes."""
    return (bits.view(-1, 8) << _places(bits)).sum(1).to(torch.uint8)


def _unpacked(planes: torch.Tensor) -> torch.Tensor:
    """Return ``[8 k]`` bytes as ``[k, 64]`` bits."""
    return ((planes.to(torch.int32).view(-1, 1) >> _places(planes)) & 1).view(-1, GROUP)


def _places(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(8, dtype=torch.int32, device=like.device)
