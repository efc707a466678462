"""Launches of Triton kernels."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_MOST_KEPT = 4096
"""Kinds of launches that are remembered at a time."""
_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    constants: tuple[Any, ...],
    warps: int,
) -> None:
    """Launch a kernel on the device of its first tensor.

    Triton's own launcher looks at every argument to find the compiled kernel, which takes longer than small
    kernels do. What a launch of this kind led to before is launched again at once; the kind is all that
    Triton distinguishes: numbers, constants, dtypes, and whether addresses are multiples of 16 bytes.

    Args:
        kernel: what ``triton.jit`` made.
        grid: programs, one or two numbers.
        tensors: its first arguments.
        numbers: those behind them.
        constants: its last ones, known when it is compiled.
        warps: of a program.
    """
    first = tensors[0]
    kind = (
        *(id(kernel), first.device.index, warps, numbers, constants),
        *[(tensor.dtype, tensor.data_ptr() % 16 == 0) for tensor in tensors],
    )
    with on_device_of(first):
        compiled = _compiled.get(kind)
        if compiled is not None:
            compiled[(*grid, 1, 1)[:3]](*tensors, *numbers, *constants)
            return
        made = kernel[grid](*tensors, *numbers, *constants, num_warps=warps)
    if made is not None:
        if len(_compiled) >= _MOST_KEPT:
            _compiled.clear()
        _compiled[kind] = made


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Return the context in which a kernel for this tensor is launched: its device is the current one."""
    if tensor.device.type != "cuda" or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


def blocks_of(size: int, block: int) -> int:
    """Return how many blocks cover a size."""
    return -(-size // block)


def power_of_2(size: int) -> int:
    """Return the smallest power of two that is not below a size above zero."""
    return 1 << (size - 1).bit_length()
