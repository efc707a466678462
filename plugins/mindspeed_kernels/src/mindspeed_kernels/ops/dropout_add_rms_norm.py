"""``npu_dropout_add_rms_norm``: dropout, addition and RMS norm in one step; see `dropout_add_norm`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mindspeed_kernels.ops.availability import torch_npu_missing
from mindspeed_kernels.ops.dropout_add_layer_norm import npu_dropout_add_layer_norm_reference
from mindspeed_kernels.ops.dropout_add_norm import (
    CONTRACT,
    NPU_CONTRACT,
    SAVED,
    Results,
    dropout_add_norm,
    kernel_dtype,
    prenorm_dtype,
    samples,
)
from mindspeed_kernels.ops.operator import Operator
from mindspeed_kernels.ops.rms_norm import rms_norm_reference, too_narrow
from mindspeed_kernels.ops.signatures import with_signature_of


@with_signature_of(npu_dropout_add_layer_norm_reference)
def npu_dropout_add_rms_norm_reference(**arguments: Any) -> Results:
    """Compute ``norm(dropout(x0 * rowscale * layerscale) + residual) * weight + bias`` with RMS norm.

    Arguments and results are those of `npu_dropout_add_layer_norm`; ``epsilon`` is added to the mean square.
    """
    return dropout_add_norm(_rms_norm, **arguments)


def _rms_norm(total: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    normed = rms_norm_reference(total, weight, epsilon)
    return normed if bias is None else normed + bias.to(total.dtype)


npu_dropout_add_rms_norm = Operator(
    "npu_dropout_add_rms_norm",
    npu_dropout_add_rms_norm_reference,
    contract=CONTRACT,
    saved=SAVED,
    samples=samples,
)


@npu_dropout_add_rms_norm.backend("npu", ("npu",), available=torch_npu_missing, contract=NPU_CONTRACT)
@with_signature_of(npu_dropout_add_layer_norm_reference)
def _npu(
    *,
    x0: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    prenorm: bool,
    residual_in_fp32: bool,
    **others: Any,
) -> Results:
    dtype = kernel_dtype(x0, weight, prenorm_dtype(x0, residual, residual_in_fp32 and prenorm))
    # The kernel takes no rows of nothing.
    return dropout_add_norm(
        _npu_rms_norm if x0.numel() and not too_narrow(x0, dtype) else _rms_norm,
        x0,
        residual,
        weight=weight.to(dtype),
        bias=None if bias is None else bias.to(dtype),
        prenorm=prenorm,
        residual_in_fp32=residual_in_fp32,
        **others,
    )


def _npu_rms_norm(total: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    import torch_npu

    normed: Tensor = torch_npu.npu_rms_norm(total.to(weight.dtype), weight, epsilon=epsilon)[0]
    return normed if bias is None else normed + bias
