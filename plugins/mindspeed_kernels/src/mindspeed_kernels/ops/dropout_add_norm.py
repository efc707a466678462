"""Dropout, residual addition and normalization in one step, the end of a transformer sublayer.

``z = dropout(x0 * rowscale * layerscale) + residual`` and ``norm(z) * weight + bias``, computed in float32,
rounded once each. `dropout_add_layer_norm` and `dropout_add_rms_norm` are the public modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_kernels.call import Call, TensorFacts
from mindspeed_kernels.contract import NPU_FLOATING, Contract, Dtype, Holds, Range, Rank, SameDtype, SameShape
from mindspeed_kernels.ops.operator import Make, Sample

Results = Tensor | tuple[Tensor, ...]
"""The norm, then, as asked for, the sum before it and the dropout's mask."""
Norm = Callable[[Tensor, Tensor, Tensor | None, float], Tensor]
"""Normalizes a sum ``[b, s, h]`` with weight, bias and epsilon."""


def dropout_add_norm(
    norm: Norm,
    x0: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    epsilon: float,
    rowscale: Tensor | None,
    layerscale: Tensor | None,
    prenorm: bool,
    residual_in_fp32: bool,
    return_dropout_mask: bool,
) -> Results:
    """Compute the operator of a norm; see `npu_dropout_add_layer_norm` for the other arguments."""
    total, mask = dropped_sum(x0, residual, dropout_p, rowscale, layerscale, return_dropout_mask)
    normed = norm(total, weight, bias, epsilon).to(x0.dtype)
    before = total.to(prenorm_dtype(x0, residual, residual_in_fp32)) if prenorm else None
    return results(normed, before, mask if return_dropout_mask else None)


def dropped_sum(
    x0: Tensor,
    residual: Tensor | None,
    dropout_p: float,
    rowscale: Tensor | None,
    layerscale: Tensor | None,
    return_dropout_mask: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the sum before the norm in the wide dtype, and where dropout kept a value."""
    wide = torch.promote_types(x0.dtype, torch.float32)
    values = x0.to(wide)
    if rowscale is not None:
        values = values * (rowscale if rowscale.dim() == x0.dim() else rowscale.unsqueeze(-1)).to(wide)
    if layerscale is not None:
        values = values * layerscale.to(wide)
    mask = None
    if dropout_p > 0.0:
        mask = torch.rand(x0.shape, device=x0.device) >= dropout_p
        kept = 1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0
        values = values * mask * kept
    elif return_dropout_mask:
        mask = torch.ones(x0.shape, dtype=torch.bool, device=x0.device)
    return (values if residual is None else values + residual.to(wide)), mask


def prenorm_dtype(x0: Tensor, residual: Tensor | None, residual_in_fp32: bool) -> torch.dtype:
    """Return the dtype in which the sum before the norm is handed out."""
    if residual is not None:
        return residual.dtype
    return torch.promote_types(x0.dtype, torch.float32) if residual_in_fp32 else x0.dtype


def kernel_dtype(x0: Tensor, weight: Tensor, before: torch.dtype) -> torch.dtype:
    """Return the dtype in which a kernel computes sum and norm, its backward included.

    Backward of the kernels takes sum and weight in one dtype. With a float32 weight, or where the sum is
    handed out in float32, that is float32, and nothing is rounded in between.
    """
    return torch.promote_types(torch.promote_types(x0.dtype, weight.dtype), before)


def results(norm: Tensor, total: Tensor | None, mask: Tensor | None) -> Results:
    """Return ``norm`` alone, or a tuple with what was asked for."""
    extra = tuple(item for item in (total, mask) if item is not None)
    return (norm, *extra) if extra else norm


def _rows(call: Call) -> tuple[Any, Any] | None:
    x0, scale = call["x0"], call["rowscale"]
    if not isinstance(scale, TensorFacts) or x0.shape is None or scale.shape is None:
        return None
    wanted = (x0.shape[:-1], (*x0.shape[:-1], 1))
    return None if scale.shape in wanted else (scale.shape, wanted[0])


CONTRACT: Contract = (
    Rank("x0", 3, 3),
    Rank("weight", 1, 1),
    Dtype("x0"),
    Dtype("weight"),
    SameShape("residual", "x0"),
    SameShape("bias", "weight"),
    SameShape("layerscale", "weight"),
    SameDtype(("weight", "bias")),
    SameDtype(("x0", "rowscale")),
    Holds("rowscale", "must have the leading sizes of x0", _rows),
    Range("dropout_p", 0.0, 1.0),
    Range("epsilon", 0.0, float("inf")),
)
"""Rules of both operators."""
NPU_CONTRACT: Contract = (
    Dtype("x0", NPU_FLOATING),
    Dtype("weight", NPU_FLOATING),
    Dtype("residual", NPU_FLOATING),
)
SAVED = "what autograd keeps of the composition; on NPUs the sum and the kernel's statistics"


def samples(make: Make) -> list[Sample]:
    """Return example calls of both operators."""
    x0, residual, weight, bias = make(2, 3, 8), make(2, 3, 8), make(8), make(8)
    return [
        Sample((x0, residual, weight, bias, 0.0, 1e-5)),
        Sample((x0, None, weight, None, 0.0, 1e-5, make(2, 3), make(8), True)),
    ]
