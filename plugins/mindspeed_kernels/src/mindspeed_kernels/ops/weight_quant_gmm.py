"""Grouped products of floating rows and 8-bit weights: ``npu_weight_quant_gmm`` and its second version.

A weight is widened to ``(W + offset) * scale`` just before it is multiplied. For inference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed_kernels.contract import Choice, ContractError, Dtype, Rank, SameShape, SameSize
from mindspeed_kernels.ops.activations import NUMBERED
from mindspeed_kernels.ops.availability import kernel_of_training_devices
from mindspeed_kernels.ops.library import custom_op
from mindspeed_kernels.ops.operator import Make, Operator, Sample
from mindspeed_kernels.ops.quantization import widened_weight
from mindspeed_kernels.ops.row_groups import bounds, ends_of_groups, npu_grouped_product, with_empty_group
from mindspeed_kernels.ops.signatures import with_signature_of


def weight_quant_grouped_matmul_reference(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor,
    ends: Tensor,
    bias: Tensor | None = None,
    act_type: int = 0,
) -> Tensor:
    """Compute ``activation(x_e · ((W_e + offset_e) * scale_e) + bias_e)`` for every group ``e`` of rows.

    Args:
        x: ``[m, k]``, floating.
        weight: int8 ``[E, k, n]``.
        antiquant_scale: ``[E, n]``, dtype of ``x``.
        antiquant_offset: ``[E, n]``.
        ends: int64 ``[E]``, where each group ends.
        bias: ``[E, n]``.
        act_type: 0 none, 1 relu, 2 tanh-approximated gelu, 4 fast gelu, 5 silu.

    Returns:
        ``[m, n]`` in the dtype of ``x``.
    """
    precise = torch.promote_types(x.dtype, torch.float32)
    result = torch.empty(x.shape[0], weight.shape[2], dtype=precise, device=x.device)
    for expert, (start, end) in enumerate(bounds(ends)):
        if end > start:
            wide = widened_weight(
                weight[expert], antiquant_scale[expert], antiquant_offset[expert], 0, precise
            )
            rows = x[start:end].to(precise) @ wide
            result[start:end] = rows if bias is None else rows + bias[expert].to(precise)
    return NUMBERED[act_type](result).to(x.dtype)


def _samples(make: Make) -> list[Sample]:
    x, weight = make(9, 16, dtype=torch.bfloat16), make(3, 16, 8, dtype=torch.int8)
    scale, offset = make(3, 8, dtype=torch.bfloat16), make(3, 8, dtype=torch.bfloat16)
    return [Sample((x, weight, scale, offset, torch.tensor([2, 2, 9])), backward=False)]


weight_quant_grouped_matmul = Operator(
    "weight_quant_grouped_matmul",
    weight_quant_grouped_matmul_reference,
    contract=(
        Rank("x", 2, 2),
        Rank("weight", 3, 3),
        Dtype("x"),
        Dtype("weight", (torch.int8,)),
        SameSize("weight", 1, "x", 1),
        SameSize("antiquant_scale", 0, "weight", 0),
        SameSize("antiquant_scale", 1, "weight", 2),
        SameShape("antiquant_offset", "antiquant_scale"),
        Choice("act_type", tuple(NUMBERED)),
    ),
    samples=_samples,
    differentiable=False,
)


_opaque = custom_op(
    "weight_quant_grouped_matmul",
    schema="(Tensor x, Tensor weight, Tensor antiquant_scale, Tensor antiquant_offset, Tensor ends, "
    "Tensor? bias, SymInt act_type) -> Tensor",
)(weight_quant_grouped_matmul_reference)


@_opaque.register_fake
def _(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@weight_quant_grouped_matmul.backend("opaque", ("cpu", "cuda"), differentiable=False)
@with_signature_of(weight_quant_grouped_matmul_reference)
def _groups(**arguments: Any) -> Tensor:
    """Compute the definition as one node of a compiled graph, where ends of groups are not known."""
    result: Tensor = _opaque(**arguments)
    return result


@weight_quant_grouped_matmul.backend(
    "npu",
    ("npu",),
    available=kernel_of_training_devices,
    contract=(Dtype("x", (torch.float16, torch.bfloat16)),),
    differentiable=False,
)
@with_signature_of(weight_quant_grouped_matmul_reference)
def _npu(**arguments: Any) -> Tensor:
    tables = ("ends", "weight", "antiquant_scale", "antiquant_offset", "bias")
    found = with_empty_group(*(arguments[name] for name in tables))
    given = {**arguments, **dict(zip(tables, found, strict=True))}
    # The kernel has activations for 8-bit rows only.
    activation = NUMBERED[given.pop("act_type")]
    result = npu_grouped_product(**given)
    return activation(result.float()).to(result.dtype)


def npu_weight_quant_gmm(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    *,
    antiquant_offset: Tensor | None = None,
    bias: Tensor | None = None,
    group_list: Sequence[int] | Tensor | None = None,
    act_type: int = 0,
) -> Tensor:
    """Compute `weight_quant_grouped_matmul` with running ends as ``group_list`` (list or int64 tensor).

    Raises:
        ContractError: an argument is outside of what is computed; the message says which.
    """
    ends = ends_of_groups("npu_weight_quant_gmm", group_list, x.shape[0], weight.shape[0])
    offset = _offset("npu_weight_quant_gmm", antiquant_offset)
    return weight_quant_grouped_matmul(x, weight, antiquant_scale, offset, ends, bias, act_type)


def npu_weight_quant_gmm_v2(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    *,
    antiquant_offset: Tensor | None = None,
    bias: Tensor | None = None,
    group_list: Tensor | None = None,
    act_type: int = 0,
) -> Tensor:
    """Compute `npu_weight_quant_gmm` with counts: ``group_list[e]`` is the number of rows of group ``e``."""
    ends = ends_of_groups("npu_weight_quant_gmm_v2", group_list, x.shape[0], weight.shape[0], counts=True)
    offset = _offset("npu_weight_quant_gmm_v2", antiquant_offset)
    return weight_quant_grouped_matmul(x, weight, antiquant_scale, offset, ends, bias, act_type)


def _offset(operator: str, offset: Tensor | None) -> Tensor:
    if offset is None:
        raise ContractError(f"{operator}: antiquant_offset is needed; pass zeros where there is none")
    return offset
