"""``npu_dropout_add_layer_norm``: dropout, addition and layer norm in one step; see `dropout_add_norm`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mindspeed_kernels.ops.availability import ascend_generation, torch_npu_missing
from mindspeed_kernels.ops.dropout_add_norm import (
    CONTRACT,
    NPU_CONTRACT,
    SAVED,
    Results,
    dropout_add_norm,
    dropped_sum,
    kernel_dtype,
    prenorm_dtype,
    results,
    samples,
)
from mindspeed_kernels.ops.operator import Operator
from mindspeed_kernels.ops.signatures import with_signature_of


def npu_dropout_add_layer_norm_reference(
    x0: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    epsilon: float,
    rowscale: Tensor | None = None,
    layerscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Results:
    """Compute ``norm(dropout(x0 * rowscale * layerscale) + residual) * weight + bias``.

    Args:
        x0: ``[b, s, h]``, floating.
        residual: ``[b, s, h]``, any floating dtype; None adds nothing.
        weight: ``[h]``.
        bias: ``[h]``, dtype of ``weight``, or None.
        dropout_p: probability that a value is dropped, 0 to 1.
        epsilon: added to the variance.
        rowscale: ``[b, s]`` or ``[b, s, 1]``, dtype of ``x0``.
        layerscale: ``[h]``.
        prenorm: return the sum before the norm as well.
        residual_in_fp32: without residual, that sum is float32.
        return_dropout_mask: return where dropout kept a value, as bool.

    Returns:
        The norm ``[b, s, h]`` in the dtype of ``x0``; a tuple with the sum (dtype of the residual) and the
        mask where they were asked for.
    """
    scales, switches = (rowscale, layerscale), (prenorm, residual_in_fp32, return_dropout_mask)
    return dropout_add_norm(_layer_norm, x0, residual, weight, bias, dropout_p, epsilon, *scales, *switches)


def _layer_norm(total: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    shift = None if bias is None else bias.to(total.dtype)
    return F.layer_norm(total, total.shape[-1:], weight.to(total.dtype), shift, epsilon)


npu_dropout_add_layer_norm = Operator(
    "npu_dropout_add_layer_norm",
    npu_dropout_add_layer_norm_reference,
    contract=CONTRACT,
    saved=SAVED,
    samples=samples,
)


def _statistics_missing() -> str:
    reason = torch_npu_missing()
    if not reason and ascend_generation() == "310P":
        return "on Ascend 310P the kernel leaves the statistics that backward reads unwritten"
    return reason


@npu_dropout_add_layer_norm.backend("npu", ("npu",), available=_statistics_missing, contract=NPU_CONTRACT)
@with_signature_of(npu_dropout_add_layer_norm_reference)
def _npu(
    *,
    x0: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    epsilon: float,
    prenorm: bool,
    residual_in_fp32: bool,
    return_dropout_mask: bool,
    **dropout: Any,
) -> Results:
    import torch_npu

    dropped, mask = dropped_sum(x0, None, return_dropout_mask=return_dropout_mask, **dropout)
    before = prenorm_dtype(x0, residual, residual_in_fp32 and prenorm)
    dtype = kernel_dtype(x0, weight, before)
    x1, scale = dropped.to(dtype), weight.to(dtype)
    x2 = torch.zeros_like(x1) if residual is None else residual.to(dtype)
    shift = torch.zeros_like(scale) if bias is None else bias.to(dtype)
    if x0.numel():
        norm, _, _, total = torch_npu.npu_add_layer_norm(x1, x2, scale, shift, epsilon, prenorm)
    else:  # The kernel takes no rows of nothing.
        total = x1 + x2
        norm = _layer_norm(total, scale, shift, epsilon)
    kept = total.to(before) if prenorm else None
    return results(norm.to(x0.dtype), kept, mask if return_dropout_mask else None)
