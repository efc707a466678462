"""Grouped products of 8-bit rows and weights: ``npu_quant_gmm`` and ``npu_quant_gmm_v2``. For inference.

The sum over the inner dimension is exact; scales and activation are applied in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed_kernels.contract import Choice, ContractError, Dtype, Rank, SameSize
from mindspeed_kernels.ops.activations import NUMBERED
from mindspeed_kernels.ops.availability import kernel_of_training_devices
from mindspeed_kernels.ops.library import custom_op
from mindspeed_kernels.ops.operator import Make, Operator, Sample
from mindspeed_kernels.ops.quantization import decoded_scale, exact_product
from mindspeed_kernels.ops.row_groups import bounds, ends_of_groups, npu_grouped_product, with_empty_group
from mindspeed_kernels.ops.signatures import with_signature_of

_INFERRED = {torch.bfloat16: torch.bfloat16, torch.float32: torch.float16, torch.int64: torch.int8}
"""Output dtype by the scale's."""


def quant_grouped_matmul_reference(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    ends: Tensor,
    per_token_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    act_type: int = 0,
) -> Tensor:
    """Compute ``activation((x_e · W_e + bias_e) * scale_e * per_token_scale)`` for every group ``e`` of rows.

    Args:
        x: int8 ``[m, k]``.
        weight: int8 ``[E, k, n]``; a transposed view is fine.
        scale: ``[E, n]``; bfloat16, float32, or packed int64.
        ends: int64 ``[E]``, where each group ends.
        per_token_scale: float32 ``[m]``.
        bias: int32 ``[E, n]``.
        output_dtype: int8, bfloat16 or float16; by default what the scale's dtype stands for.
        act_type: 0 none, 1 relu, 2 tanh-approximated gelu, 4 fast gelu, 5 silu.

    Returns:
        ``[m, n]``.
    """
    dtype = _output_dtype(scale, per_token_scale, output_dtype, act_type)
    scales = decoded_scale(scale)
    result = torch.empty(x.shape[0], weight.shape[2], dtype=torch.float32, device=x.device)
    for expert, (start, end) in enumerate(bounds(ends)):
        exact = exact_product(x[start:end], weight[expert], None if bias is None else bias[expert])
        result[start:end] = (exact * scales[expert].double()).float()
    if per_token_scale is not None:
        result = result * per_token_scale.float().unsqueeze(1)
    result = NUMBERED[act_type](result)
    return result.round().clamp(-128, 127).to(dtype) if dtype == torch.int8 else result.to(dtype)


def _output_dtype(
    scale: Tensor, per_token_scale: Tensor | None, output_dtype: torch.dtype | None, act_type: int
) -> torch.dtype:
    inferred = _INFERRED[scale.dtype]
    dtype = output_dtype or inferred
    if dtype != inferred:
        wanted = next(key for key, value in _INFERRED.items() if value == dtype)
        raise ContractError(
            f"npu_quant_gmm: output_dtype {dtype} needs a scale of {wanted}, got {scale.dtype}"
        )
    if dtype == torch.int8 and (per_token_scale is not None or act_type):
        raise ContractError("npu_quant_gmm: an int8 output takes neither per_token_scale nor an activation")
    return dtype


def _samples(make: Make) -> list[Sample]:
    x, weight = make(9, 16, dtype=torch.int8), make(3, 16, 8, dtype=torch.int8)
    ends = torch.tensor([2, 2, 9])
    return [
        Sample(
            (x, weight, make(3, 8, dtype=torch.float32), ends, make(9, dtype=torch.float32)), backward=False
        ),
        Sample((x, weight, make(3, 8, dtype=torch.bfloat16), ends), backward=False),
    ]


quant_grouped_matmul = Operator(
    "quant_grouped_matmul",
    quant_grouped_matmul_reference,
    contract=(
        Rank("x", 2, 2),
        Rank("weight", 3, 3),
        Dtype("x", (torch.int8,)),
        Dtype("weight", (torch.int8,)),
        Dtype("scale", (torch.bfloat16, torch.float32, torch.int64)),
        Dtype("bias", (torch.int32,)),
        Dtype("per_token_scale", (torch.float32,)),
        SameSize("weight", 1, "x", 1),
        SameSize("scale", 0, "weight", 0),
        SameSize("scale", 1, "weight", 2),
        SameSize("per_token_scale", 0, "x", 0),
        Choice("act_type", tuple(NUMBERED)),
        Choice("output_dtype", (None, torch.int8, torch.bfloat16, torch.float16)),
    ),
    samples=_samples,
    differentiable=False,
)


_opaque = custom_op(
    "quant_grouped_matmul",
    schema="(Tensor x, Tensor weight, Tensor scale, Tensor ends, Tensor? per_token_scale, Tensor? bias, "
    "ScalarType? output_dtype, SymInt act_type) -> Tensor",
)(quant_grouped_matmul_reference)


@_opaque.register_fake
def _(
    x: Tensor, weight: Tensor, scale: Tensor, ends: Tensor, per_token_scale: Any, bias: Any, *others: Any
) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2], dtype=_output_dtype(scale, per_token_scale, *others))


@quant_grouped_matmul.backend("opaque", ("cpu", "cuda"), differentiable=False)
@with_signature_of(quant_grouped_matmul_reference)
def _groups(**arguments: Any) -> Tensor:
    """Compute the definition as one node of a compiled graph, where ends of groups are not known."""
    result: Tensor = _opaque(**arguments)
    return result


@quant_grouped_matmul.backend("npu", ("npu",), available=kernel_of_training_devices, differentiable=False)
@with_signature_of(quant_grouped_matmul_reference)
def _npu(
    *,
    weight: Tensor,
    scale: Tensor,
    ends: Tensor,
    bias: Tensor | None,
    per_token_scale: Tensor | None,
    output_dtype: torch.dtype | None,
    act_type: int,
    **others: Any,
) -> Tensor:
    ends, weight, scale, bias = with_empty_group(ends, weight, scale, bias)
    return npu_grouped_product(
        weight=weight,
        scale=scale,
        ends=ends,
        bias=bias,
        per_token_scale=per_token_scale,
        act_type=act_type,
        output_dtype=_output_dtype(scale, per_token_scale, output_dtype, act_type),
        **others,
    )


def npu_quant_gmm(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    per_token_scale: Tensor | None = None,
    bias: Tensor | None = None,
    group_list: Sequence[int] | Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    act_type: int = 0,
) -> Tensor:
    """Compute `quant_grouped_matmul` with running ends as ``group_list`` (list or int64 tensor).

    ``offset`` is kept for the argument order and must be None. Without ``output_dtype`` the result has the
    dtype that the scale's stands for: bfloat16 for bfloat16, float16 for float32, int8 for packed int64.

    Raises:
        ContractError: an argument is outside of what is computed; the message says which.
    """
    _no_offset("npu_quant_gmm", offset)
    ends = ends_of_groups("npu_quant_gmm", group_list, x.shape[0], weight.shape[0])
    return quant_grouped_matmul(x, weight, scale, ends, per_token_scale, bias, output_dtype, act_type)


def npu_quant_gmm_v2(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    per_token_scale: Tensor | None = None,
    bias: Tensor | None = None,
    group_list: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    act_type: int = 0,
) -> Tensor:
    """Compute `npu_quant_gmm` with counts: ``group_list[e]`` is the number of rows of group ``e``."""
    _no_offset("npu_quant_gmm_v2", offset)
    ends = ends_of_groups("npu_quant_gmm_v2", group_list, x.shape[0], weight.shape[0], counts=True)
    return quant_grouped_matmul(x, weight, scale, ends, per_token_scale, bias, output_dtype, act_type)


def _no_offset(operator: str, offset: Tensor | None) -> None:
    if offset is not None:
        raise ContractError(f"{operator}: offset is not computed by any kernel; nearest supported: None")
