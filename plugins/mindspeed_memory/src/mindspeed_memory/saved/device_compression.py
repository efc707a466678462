"""Compressed storages by the operators of an NPU.

The device counts how often each exponent occurs and gives frequent ones shorter codes. Codes go into a part
of fixed size on the device. What does not fit there goes into memory of the host that the device addresses.
It is large enough for the worst case, so that nothing is ever lost and nobody asks how long the codes are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_memory.saved.host_pool import HostPool

LEAST, BLOCK = 32768, 64
"""The operators take numbers by 64, and so many or more."""
_VALUES, _HEAD, _TAIL = 256, 512, 8448
_ROOM = 3
"""Bits of a code that the part on the device has room for, of each number on average."""


class DeviceCodes(NamedTuple):
    """A storage of bfloat16 as the operators keep it.

    Attributes:
        counts: how often each exponent occurs, int32 ``[1, 256]``.
        mantissa: signs and mantissas, on the device or in addressed memory of the host.
        fixed: codes on the device.
        var: those that did not fit, in addressed memory of the host.
        hosted: buffers of the host.
    """

    counts: Tensor
    mantissa: Tensor
    fixed: Tensor
    var: Tensor
    hosted: tuple[Tensor, ...]


def worst_case(count: int) -> int:
    """Return the bytes that the codes of so many numbers need at worst, whatever the number of cores."""
    return count + count // BLOCK + _TAIL * (count // LEAST) + _HEAD


def addressed_memory(size: int, device: torch.device) -> Tensor:
    """Return uninitialised memory of the host that the device addresses, uint8 ``[size]``."""
    import torch_npu

    memory: Tensor = torch_npu.empty_with_swapped_memory([size], dtype=torch.uint8, device=device)
    return memory


def encode(numbers: Tensor, pool: HostPool, *, mantissa_on_host: bool) -> DeviceCodes:
    """Compress bfloat16 ``[n]``; ``n`` is a multiple of 64, and 32,768 or more.

    Args:
        numbers: on an NPU.
        pool: of addressed memory.
        mantissa_on_host: signs and mantissas too.
    """
    import torch_npu

    count, size = numbers.numel(), numbers.element_size()
    room = (_HEAD + count * _ROOM // 8 + BLOCK - 1) // BLOCK * BLOCK
    hosted = [pool.take((worst_case(count) - room + BLOCK - 1) // BLOCK * BLOCK)[0]]
    if mantissa_on_host:
        hosted.append(pool.take(count * (size - 1))[0])
        mantissa = hosted[1].view(numbers.dtype)
    else:
        mantissa = numbers.new_empty(count * (size - 1) // size)
    counts = torch.zeros((1, _VALUES), dtype=torch.int32, device=numbers.device)
    fixed, var = numbers.new_empty(room // size), hosted[0].view(numbers.dtype)
    torch_npu.npu_hans_encode(numbers, True, False, out=(counts, mantissa, fixed, var))
    return DeviceCodes(counts, mantissa, fixed, var, tuple(hosted))


def decode(codes: DeviceCodes, into: Tensor) -> Tensor:
    """Write the numbers into bfloat16 ``[n]``, and return it."""
    import torch_npu

    torch_npu.npu_hans_decode(codes.mantissa, codes.fixed, codes.var, codes.counts, False, out=into)
    return into


class DeviceCompressor:
    """Puts storages into the device's compressed form; see `mindspeed_memory.saved.compression.Compressor`.

    Attributes:
        before: bytes of everything that was compressed so far.
        after: bytes that it had then on the device.
    """

    def __init__(self, pool: HostPool, *, smallest: int, mantissa_on_host: bool) -> None:
        """Start with nothing compressed.

        Args:
            pool: of addressed memory.
            smallest: elements below which a storage stays as it is.
            mantissa_on_host: signs and mantissas leave the device.
        """
        self.before = self.after = 0
        self._pool, self._smallest, self._hosted = pool, max(smallest, LEAST), mantissa_on_host

    def __call__(self, flat: Tensor) -> DeviceCompressed | None:
        """Compress a storage ``[n]``; None where it is none of bfloat16, or too small."""
        count = flat.numel()
        if flat.dtype is not torch.bfloat16 or count < self._smallest or count % BLOCK:
            return None
        codes = encode(flat, self._pool, mantissa_on_host=self._hosted)
        kept = [codes.counts, codes.fixed, *(() if self._hosted else (codes.mantissa,))]
        self.before += count * flat.element_size()
        self.after += sum(part.numel() * part.element_size() for part in kept)
        return DeviceCompressed(flat, codes, self._pool)


class DeviceCompressed:
    """A storage of bfloat16 in the device's compressed form."""

    is_on_device = True

    def __init__(self, flat: Tensor, codes: DeviceCodes, pool: HostPool) -> None:
        """Keep both forms until the original is let go."""
        self._there: Tensor | None = flat
        self._device, self._count = flat.device, flat.numel()
        self._codes, self._pool = codes, pool

    def release(self) -> None:
        """Let go of the original; the encoder runs on the compute stream, as what comes later does."""
        self._there = None

    def fetch(self) -> None:
        """Do nothing: the device addresses what is on the host."""

    def flat(self) -> Tensor:
        """Return the numbers ``[n]``."""
        if self._there is None:
            into = torch.empty(self._count, dtype=torch.bfloat16, device=self._device)
            with torch.no_grad():
                self._there = decode(self._codes, into)
        return self._there

    def __del__(self) -> None:
        """Return the buffers; the compute stream reads them before anybody writes there again."""
        for buffer in self._codes.hosted:
            self._pool.give(buffer)
