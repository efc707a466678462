"""Fork beside a training: cheap for the trainer, and no process outlives it.

After a fork each page that the trainer writes is copied on its first write, which costs a CPU training more
than the save itself. Large memory that the child does not read is therefore kept out of it; what it reads is
shared memory, whose pages are never copied.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

_LINUX = sys.platform == "linux"
_LIBC = ctypes.CDLL(None, use_errno=True) if _LINUX else None
_DONTFORK, _DOFORK = 10, 11
_PR_SET_PDEATHSIG = 1
_SMALLEST = 1 << 16
"""Bytes below which a storage is left to copy-on-write."""


@contextmanager
def kept_out_of_forks(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Keep the host memory of tensors out of processes that are forked inside the context.

    A child that touches such memory is killed by the kernel. Elsewhere than on Linux
    nothing happens.

    Args:
        tensors: of any device; those that are not in host memory are passed over.
    """
    ranges = list(_page_ranges(tensors)) if _LIBC is not None else []
    advised = [place for place in ranges if _advise(place, _DONTFORK)]
    try:
        yield
    finally:
        for place in advised:
            _advise(place, _DOFORK)


def _page_ranges(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Yield address and length of the whole pages of each storage, once."""
    seen = set()
    for tensor in tensors:
        if tensor.device.type != "cpu":
            continue
        storage = tensor.untyped_storage()
        begin, size = storage.data_ptr(), storage.nbytes()
        if size < _SMALLEST or begin in seen:
            continue
        seen.add(begin)
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (begin + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            yield first, last - first


def _advise(place: tuple[int, int], advice: int) -> bool:
    assert _LIBC is not None
    address, length = place
    status: int = _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), ctypes.c_int(advice))
    return status == 0


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this forked process when its parent ends, however that ends.

    Otherwise a writer of a killed trainer would hold its connections open, and the other ranks would not
    notice that it is gone.

    Args:
        parent: the process that forked this one.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
