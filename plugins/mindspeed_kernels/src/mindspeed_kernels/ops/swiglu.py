"""SwiGLU (Shazeer, 2020): the gated activation ``silu(a) * b`` of the two halves of a tensor.

The fast path keeps only its input for backward and computes the activation again there, where the composition
of torch operations keeps half a tensor more. Everything is computed in float32 (float64 for float64) and
rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_kernels.ops.operator import Operator


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
        gate, value = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate.to(_wide(x.dtype))).mul_(value).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Gradient of the input ``[..., 2 f]``."""
        (x,) = ctx.saved_tensors
        wide = _wide(x.dtype)
        gate, value = x.chunk(2, dim=-1)
        gate = gate.to(wide)
        gradient = gradients[0].to(wide)
        result = torch.empty_like(x)
        to_gate, to_value = result.chunk(2, dim=-1)
        to_gate.copy_(torch.ops.aten.silu_backward(gradient * value, gate))
        to_value.copy_(torch.nn.functional.silu(gate).mul_(gradient))
        return result


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
