"""SwiGLU (Shazeer, 2020): the gated activation ``silu(a) * b`` of the two halves of a tensor.

The fast path keeps only its input for backward and computes the activation again there, where the composition
of torch operations keeps half a tensor more. Everything is computed in float32 (float64 for float64) and
rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mindspeed_kernels.ops.operator import Operator

_CACHED_ELEMENTS = 1 << 17
"""Elements of the input that a CPU works on at a time."""


def swiglu_reference(x: Tensor) -> Tensor:
    """``silu(a) * b`` with ``[a | b] = x`` along the last dimension.

    Args:
        x: ``[..., 2 f]``, any floating dtype.

    Returns:
        ``[..., f]`` in the dtype of ``x``.

    Raises:
        ValueError: the last dimension is odd.
    """
    _check(x)
    wide = _wide(x.dtype)
    gate, value = x.to(wide).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * value).to(x.dtype)


class SwiGLUFunction(torch.autograd.Function):
    """Keeps the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Activate ``[..., 2 f]``; see `swiglu_reference`."""
        ctx.save_for_backward(x)
        if not _blockwise(x):
            return _activation(x)
        rows = x.reshape(-1, x.shape[-1])
        result = x.new_empty(rows.shape[0], x.shape[-1] // 2)
        for block in _blocks(rows):
            gate, value = rows[block].chunk(2, dim=-1)
            torch.mul(F.silu(gate.to(_wide(x.dtype))), value, out=result[block])
        return result.view(*x.shape[:-1], x.shape[-1] // 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Gradient of the input ``[..., 2 f]``."""
        (x,) = ctx.saved_tensors
        if not _blockwise(x):
            return _gradient(x, gradients[0])
        rows = x.reshape(-1, x.shape[-1])
        outer = gradients[0].reshape(-1, x.shape[-1] // 2)
        result = torch.empty_like(rows)
        for block in _blocks(rows):
            gate, value = rows[block].to(_wide(x.dtype)).chunk(2, dim=-1)
            gradient = outer[block].to(gate.dtype)
            to_gate, to_value = result[block].chunk(2, dim=-1)
            torch.ops.aten.silu_backward.grad_input(gradient * value, gate, grad_input=to_gate)
            torch.mul(F.silu(gate), gradient, out=to_value)
        return result.view(x.shape)


def _activation(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, dim=-1)
    return (F.silu(gate.to(_wide(x.dtype))) * value).to(x.dtype)


def _gradient(x: Tensor, gradient: Tensor) -> Tensor:
    gate, value = x.to(_wide(x.dtype)).chunk(2, dim=-1)
    gradient = gradient.to(gate.dtype)
    to_gate = torch.ops.aten.silu_backward(gradient * value, gate)
    return torch.cat((to_gate, F.silu(gate) * gradient), dim=-1).to(x.dtype)


def _blockwise(x: Tensor) -> bool:
    # A compiler fuses the whole computation itself.
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _blocks(rows: Tensor) -> Iterator[slice]:
    """Slices of rows, so few that intermediate results stay in a CPU's cache."""
    count, width = rows.shape
    step = max(1, _CACHED_ELEMENTS // width)
    for start in range(0, count, step):
        yield slice(start, start + step)


def _fused(x: Tensor) -> Tensor:
    _check(x)
    result: Tensor = SwiGLUFunction.apply(x)
    return result


def _npu(x: Tensor) -> Tensor:
    import torch_npu

    _check(x)
    result: Tensor = torch_npu.npu_swiglu(x, dim=-1)
    return result


def _check(x: Tensor) -> None:
    if x.shape[-1] % 2:
        raise ValueError(f"swiglu: the last dimension holds gate and value, must be even, got {x.shape[-1]}")


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


swiglu = Operator("swiglu", swiglu_reference, {"cpu": _fused, "cuda": _fused, "npu": _npu})
