"""Operations of PyTorch that torch_npu has kernels of and the host has not.

torch_npu differentiates a few operations as a whole that the host differentiates in parts, some under a name
of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def differentiate(
    function: Callable[..., Tensor], inputs: Sequence[Tensor | None], gradient: Tensor, mask: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of a function of tensors, and None where ``mask`` is off."""
    with recording_gradients(), torch.enable_grad():
        leaves = [
            None if tensor is None else tensor.detach().requires_grad_(wanted)
            for tensor, wanted in zip(inputs, mask)
        ]
        result = function(*leaves)
        asked = [leaf for leaf, wanted in zip(leaves, mask) if wanted and leaf is not None]
        found = iter(torch.autograd.grad(result, asked, gradient))
    return tuple(next(found) if wanted and leaf is not None else None for leaf, wanted in zip(leaves, mask))


def recording_gradients() -> Any:
    """Return a context in which autograd records on the host, below the autograd of the device."""
    return torch._C._ForceDispatchKeyGuard(
        torch._C._dispatch_tls_local_include_set(),
        torch._C._dispatch_tls_local_exclude_set()
        - torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCPU),
    )


def _matmul_backward(grad: Tensor, self: Tensor, other: Tensor, mask: Sequence[bool]) -> Any:
    return differentiate(torch.matmul, (self, other), grad, mask)


def _linear_backward(self: Tensor, grad_output: Tensor, weight: Tensor, mask: Sequence[bool]) -> Any:
    def linear(x: Tensor, w: Tensor, *bias: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, w, *bias)

    bias = (grad_output.new_zeros(weight.shape[0]),) if mask[2] else ()
    found = differentiate(linear, (self, weight, *bias), grad_output, mask)
    return (*found, None)[:3]


def _repeat_backward(grad: Tensor, input: Tensor, repeats: Any, dim: int | None = None) -> Any:
    return differentiate(lambda x: torch.repeat_interleave(x, repeats, dim), (input,), grad, (True,))[0]


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype, copy=True)


def _widened(function: Callable[..., Tensor], count: int) -> Callable[..., Tensor]:
    """Return products of ``count`` half operands that are summed and kept in a wider dtype."""

    def product(*args: Any, out: Tensor | None = None, **scales: Any) -> Tensor:
        *tensors, dtype = args[: count + 1]
        found = function(*(tensor.to(dtype) for tensor in tensors), *args[count + 1 :], **scales)
        return found if out is None else out.copy_(found)

    return product


FORMULAS: Mapping[str, Callable[..., Any]] = {
    "aten::matmul_backward": _matmul_backward,
    "aten::linear_backward": _linear_backward,
    "npu::repeat_interleave_backward_int": _repeat_backward,
    "npu::repeat_interleave_backward_tensor": _repeat_backward,
    "npu::_npu_dtype_cast": _cast,
    "npu::_npu_dtype_cast_backward": _cast,
    "npu::_npu_format_cast": lambda x, acl_format: x.clone(),
    **{
        f"aten::{name}.{overload}": _widened(function, count)
        for name, function, count in (("mm", torch.mm, 2), ("bmm", torch.bmm, 2), ("addmm", torch.addmm, 3))
        for overload in ("dtype", "dtype_out")
    },
}
"""By operation."""
