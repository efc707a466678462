"""Storages that wait in compressed form, on the device or with their incompressible part on the host."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mindspeed_memory.exponent_blocks import BLOCK, Blocks, compress_exponents, restore_exponents
from mindspeed_memory.saved.host_copy import HostCopies, HostCopy


@dataclass(frozen=True)
class Compressed:
    """bfloat16 in compressed form: sign and mantissa as they are, exponents in blocks.

    Every bit pattern comes back as it was.

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


SMALLEST = 32768
"""Elements below which nothing is compressed."""


class Compressor:
    """Puts storages into compressed form.

    Attributes:
        before: bytes of everything that was compressed so far.
        after: bytes that it had then on the device.
    """

    def __init__(self, *, smallest: int = SMALLEST, host: HostCopies | None = None) -> None:
        """Start with nothing compressed.

        Args:
            smallest: elements below which a storage stays as it is.
            host: takes sign and mantissa; None keeps them on the device.
        """
        self.before = self.after = 0
        self._smallest = smallest
        self._host = host

    def __call__(self, flat: Tensor) -> CompressedStorage | None:
        """Compress a storage ``[n]``; None where it is none of bfloat16, too small, or would not shrink."""
        count = flat.numel()
        if flat.dtype is not torch.bfloat16 or count < self._smallest or count % BLOCK:
            return None
        compressed = compress(flat)
        size = compressed.nbytes
        on_device = size - (compressed.rest.numel() if self._host else 0)
        if on_device >= count * flat.element_size():
            return None
        self.before += count * flat.element_size()
        self.after += on_device
        return CompressedStorage(flat, compressed, self._host)


class CompressedStorage:
    """A storage of bfloat16 in compressed form."""

    def __init__(self, flat: Tensor, compressed: Compressed, host: HostCopies | None) -> None:
        """Keep both forms until the original is let go.

        Args:
            flat: the original ``[n]``.
            compressed: what it became.
            host: takes sign and mantissa.
        """
        self._there: Tensor | None = flat
        self._device, self._count = flat.device, flat.numel()
        self._rest: HostCopy | None = None
        if host is not None:
            self._rest = host(compressed.rest)
            compressed = replace(compressed, rest=compressed.rest.new_empty(0))
        self._compressed = compressed

    @property
    def is_on_device(self) -> bool:
        """Return whether it can be read at once."""
        return self._there is not None or self._rest is None or self._rest.is_on_device

    def release(self) -> None:
        """Let go of the original."""
        self._there = None
        if self._rest is not None:
            self._rest.release()

    def fetch(self) -> None:
        """Begin to bring back what is on the host; numbers are restored when they are read."""
        if self._there is None and self._rest is not None:
            self._rest.fetch()

    def flat(self) -> Tensor:
        """Return the numbers ``[n]``."""
        if self._there is None:
            compressed = self._compressed
            if self._rest is not None:
                compressed = replace(compressed, rest=self._rest.flat())
            into = torch.empty(self._count, dtype=torch.bfloat16, device=self._device)
            with torch.no_grad():
                self._there = restore(compressed, into)
        return self._there
