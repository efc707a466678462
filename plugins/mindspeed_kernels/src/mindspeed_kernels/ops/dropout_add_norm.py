"""Dropout, residual addition and normalization in one step, the end of a transformer sublayer.

``z = dropout(x0 * rowscale * layerscale) + residual`` and ``norm(z) * weight + bias``, computed in float32,
rounded once each. `dropout_add_layer_norm` and `dropout_add_rms_norm` are the public modules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mindspeed_kernels.ops.call import Call, TensorFacts
from mindspeed_kernels.ops.contract import Contract, Dtype, Holds, Range, Rank, SameDtype, SameShape
from mindspeed_kernels.ops.rms_norm import rms_norm_reference

Results = Tensor | tuple[Tensor, ...]
"""The norm, then, as asked for, the sum before it and the dropout's mask."""


def dropped_sum(
    x0: Tensor,
    residual: Tensor | None,
    dropout_p: float,
    rowscale: Tensor | None,
    layerscale: Tensor | None,
    want_mask: bool,
) -> tuple[Tensor, Tensor | None]:
    """The sum before the norm in the wide dtype, and where dropout kept a value."""
    wide = torch.float64 if x0.dtype == torch.float64 else torch.float32
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
    elif want_mask:
        mask = torch.ones(x0.shape, dtype=torch.bool, device=x0.device)
    return (values if residual is None else values + residual.to(wide)), mask


def prenorm_dtype(x0: Tensor, residual: Tensor | None, residual_in_fp32: bool) -> torch.dtype:
    """Dtype in which the sum before the norm is handed out."""
    if residual is not None:
        return residual.dtype
    return torch.float32 if residual_in_fp32 and x0.dtype != torch.float64 else x0.dtype


def normalized(total: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, *, rms: bool) -> Tensor:
    """Layer norm or RMS norm of the sum, in its dtype."""
    shift = None if bias is None else bias.to(total.dtype)
    if not rms:
        return F.layer_norm(total, total.shape[-1:], weight.to(total.dtype), shift, epsilon)
    result = rms_norm_reference(total, weight, epsilon)
    return result if shift is None else result + shift


def results(norm: Tensor, total: Tensor | None, mask: Tensor | None) -> Results:
    """``norm`` alone or a tuple with what was asked for."""
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
"""What both operators demand."""
