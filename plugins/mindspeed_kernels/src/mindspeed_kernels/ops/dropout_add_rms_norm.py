"""``npu_dropout_add_rms_norm``: dropout, addition and RMS norm in one step; see `dropout_add_norm`."""

from __future__ import annotations

from torch import Tensor

from mindspeed_kernels.ops.availability import torch_npu_missing
from mindspeed_kernels.ops.contract import NPU_FLOATING, Dtype, SameDtype
from mindspeed_kernels.ops.dropout_add_norm import (
    CONTRACT,
    Results,
    dropped_sum,
    normalized,
    prenorm_dtype,
    results,
)
from mindspeed_kernels.ops.operator import Make, Operator, Sample


def npu_dropout_add_rms_norm_reference(
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
    """``norm(dropout(x0 * rowscale * layerscale) + residual) * weight + bias``.

    Args:
        x0: ``[b, s, h]``, floating.
        residual: ``[b, s, h]``, any floating dtype; None adds nothing.
        weight: ``[h]``.
        bias: ``[h]``, dtype of ``weight``, or None.
        dropout_p: probability that a value is dropped, 0 to 1.
        epsilon: added to the variance.
        rowscale: ``[b, s]`` or ``[b, s, 1]``, dtype of ``x0``.
        layerscale: ``[h]``.
        prenorm: hand out the sum before the norm as well.
        residual_in_fp32: without residual, that sum is float32.
        return_dropout_mask: hand out where dropout kept a value, as bool.

    Returns:
        The norm ``[b, s, h]`` in the dtype of ``x0``; a tuple with the sum (dtype of the residual) and the
        mask where they were asked for.
    """
    total, mask = dropped_sum(x0, residual, dropout_p, rowscale, layerscale, return_dropout_mask)
    norm = normalized(total, weight, bias, epsilon, rms=True).to(x0.dtype)
    before = total.to(prenorm_dtype(x0, residual, residual_in_fp32)) if prenorm else None
    return results(norm, before, mask if return_dropout_mask else None)


def _samples(make: Make) -> list[Sample]:
    x0, residual, weight, bias = make(2, 3, 8), make(2, 3, 8), make(8), make(8)
    return [
        Sample((x0, residual, weight, bias, 0.0, 1e-5)),
        Sample((x0, None, weight, None, 0.0, 1e-5, make(2, 3), make(8), True)),
    ]


npu_dropout_add_rms_norm = Operator(
    "npu_dropout_add_rms_norm",
    npu_dropout_add_rms_norm_reference,
    contract=CONTRACT,
    saved="what autograd keeps of the composition; on NPUs the sum and the kernel's statistics",
    samples=_samples,
)


@npu_dropout_add_rms_norm.backend(
    "npu",
    ("npu",),
    available=torch_npu_missing,
    contract=(Dtype("x0", NPU_FLOATING), SameDtype(("x0", "weight"))),
)
def _npu(
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
    import torch_npu

    total, mask = dropped_sum(x0, residual, dropout_p, rowscale, layerscale, return_dropout_mask)
    norm = torch_npu.npu_rms_norm(total.to(x0.dtype), weight, epsilon=epsilon)[0]
    norm = norm if bias is None else norm + bias
    before = total.to(prenorm_dtype(x0, residual, residual_in_fp32)) if prenorm else None
    return results(norm, before, mask if return_dropout_mask else None)
