"""Whose kernels a dry run plans, where its tensors carry another device's name.

Tensors labelled ``cuda`` abort a torch that is built without CUDA as soon as they require grad. A plan for
CUDA labels them ``cpu``, and code that chooses between kernels by the type of a device asks here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# A plain name: torch.compile traces code that asks for it, and stops at a context variable.
_planned = ""


def kernels_for(device_type: str) -> str:
    """Return the type of device whose kernels serve tensors of a type of device: that, unless planned."""
    return _planned or device_type


@contextmanager
def kernels_of(device_type: str) -> Iterator[None]:
    """Choose the kernels of a type of device inside the context, which has to be a dry run.

    Args:
        device_type: ``cuda``; empty for those of the tensors' own device.
    """
    global _planned
    before, _planned = _planned, device_type
    try:
        yield
    finally:
        _planned = before
