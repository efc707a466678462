"""Values that are held back until somebody waits for them, and what stands in their place."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed_testing.lagging.streams import LaggingStream


@dataclass(eq=False)
class Pending:
    """A result that nobody has waited for.

    Attributes:
        stream: that writes it.
        count: number of the work.
        there: the place in the storage, by reference to it.
        value: to be put there.
        work: of a backend that fills the value; None where it is there.
    """

    stream: LaggingStream
    count: int
    storage: weakref.ref[torch.UntypedStorage]
    view: tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...]]
    value: Tensor
    work: Any = None


def strided(values: Any) -> list[Tensor]:
    """Return the dense tensors among arguments or results that are on the host."""
    found: list[Tensor] = []
    _collect(values if isinstance(values, (tuple, list, dict)) else (values,), found)
    return found


def _collect(values: Any, found: list[Tensor]) -> None:
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, Tensor):
            if value.layout is torch.strided and value.device.type == "cpu":
                found.append(value)
        elif isinstance(value, (tuple, list, dict)):
            _collect(value, found)


def view_of(storage: torch.UntypedStorage, view: tuple[Any, ...]) -> Tensor:
    """Return a tensor of its own at a place of a storage."""
    dtype, offset, size, stride = view
    # A tensor of its own: one that is written here does not count as written for autograd.
    return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)


def poison(tensor: Tensor) -> None:
    """Write what no result should be."""
    place = view_of(
        tensor.untyped_storage(),
        (tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()),
    )
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        place.fill_(float("nan"))
    elif tensor.dtype is torch.uint8:
        place.fill_(255)
    elif tensor.dtype is not torch.bool:
        place.fill_(torch.iinfo(tensor.dtype).min)


def poison_floats(tensors: Iterable[Tensor]) -> None:
    """Write NaN into those of the tensors that can hold it."""
    for tensor in tensors:
        # Wrong indices would end the program before it can say what it found.
        if tensor.is_floating_point():
            poison(tensor)


def put(one: Pending) -> None:
    """Put a value in its place, when the backend has it, and where the storage is still there."""
    storage = one.storage()
    if one.work is not None:
        one.work.wait()
    if storage is None:
        return
    dtype, offset, size, stride = one.view
    needed = (offset + 1 + sum((length - 1) * step for length, step in zip(size, stride))) * dtype.itemsize
    if storage.nbytes() >= needed:
        view_of(storage, one.view).copy_(one.value)
