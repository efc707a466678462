"""Grouped products: ``npu_grouped_matmul``, ``npu_grouped_matmul_add_`` and ATB's accumulating product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mindspeed_testing.npu.kernels.contract import Arguments, Kernel, Rule, unwritten
from mindspeed_testing.npu.kernels.mx_formats import E8M0, FLOAT8, PAIR, exponents_of, widened
from mindspeed_testing.npu.kernels.repositories import atb, later_ops_transformer, op_plugin, ops_transformer
from mindspeed_testing.npu.kernels.rules import HALF, accumulated, both_half, not_empty

_BY_ROWS, _BY_SUM = 0, 2
_MOST_GROUPS, _LONGEST_ROW = 1024, 65535
_OPTIONS = (
    *("bias", "scale", "offset", "antiquant_scale", "antiquant_offset", "per_token_scale"),
    *("activation_input", "activation_quant_scale", "activation_quant_offset"),
)
_ACTIVATIONS: dict[int, Any] = {
    0: lambda x: x,
    1: torch.relu,
    2: lambda x: F.gelu(x, approximate="tanh"),
    4: lambda x: x * torch.sigmoid(1.702 * x),
    5: F.silu,
}


def is_transposed(tensor: Tensor) -> bool:
    """Return whether the last two dimensions are those of a transposed contiguous matrix."""
    rows, columns = tensor.shape[-2:]
    return rows * columns != 1 and tensor.stride(-2) == 1 and tensor.stride(-1) == rows


def _x(a: Arguments) -> Tensor:
    tensor: Tensor = a["x"][0]
    return tensor


def _weight(a: Arguments) -> Tensor:
    tensor: Tensor = a["weight"][0]
    return tensor


def _groups(a: Arguments) -> int:
    return int(a["group_list"].numel()) if a["group_type"] == _BY_SUM else int(_weight(a).shape[0])


def _dtypes_match(a: Arguments) -> bool:
    x, weight = _x(a).dtype, _weight(a).dtype
    if x in FLOAT8:
        return weight in FLOAT8 and a.soc == "950"
    if x == weight:
        allowed = (torch.float16,) if a.soc == "310P" else (*HALF, torch.float32, torch.int8)
        return x in allowed
    return x in HALF and weight == torch.int8 and a.soc != "310P"


def _options_match(a: Arguments) -> bool:
    x, weight = _x(a).dtype, _weight(a).dtype
    given = {name for name in _OPTIONS if a[name] is not None}
    if x in FLOAT8:
        return given == {"scale", "per_token_scale"} and _exponents_match(a)
    if x == torch.int8:
        return given <= {"bias", "scale", "per_token_scale", "offset"} and "scale" in given
    if weight == torch.int8:
        return given <= {"bias", "antiquant_scale", "antiquant_offset"} and len(given) >= 2
    return given <= {"bias"}


def _exponents_match(a: Arguments) -> bool:
    """Judge the exponents of MX formats, in pairs: their dtype, sizes, and which way they lie."""
    x, weight, (of_x,), (of_weight,) = _x(a), _weight(a), a["per_token_scale"], a["scale"]
    pairs = -(-x.shape[1] // PAIR)
    if a["group_type"] == _BY_SUM:
        pairs = x.shape[1] // PAIR + a["group_list"].numel()
    rows, columns = x.shape[0], weight.shape[-1]
    return (
        {of_x.dtype, of_weight.dtype} == {torch.uint8}
        and a["scale_dtype"] == a["per_token_scale_dtype"] == E8M0
        and tuple(of_x.shape) == (rows, pairs, 2)
        and tuple(of_weight.shape) == (*weight.shape[:-2], pairs, columns, 2)
        and all(_lie_alike(*both) for both in ((of_x, x), (of_weight, weight)))
        and _output_dtype(a) in (*HALF, torch.float32)
    )


def _lie_alike(exponents: Tensor, operand: Tensor) -> bool:
    *_, rows, columns, _ = exponents.shape
    if rows == columns == 1:
        return True
    transposed = exponents.stride()[-3:] == (2, 2 * rows, 1)
    return transposed == is_transposed(operand)


def _bias_matches(a: Arguments) -> bool:
    if a["bias"] is None:
        return True
    x, bias = _x(a).dtype, a["bias"][0]
    wanted = {torch.bfloat16: (torch.float32,), torch.int8: (torch.int32, torch.bfloat16)}.get(x, (x,))
    return bias.dtype in wanted and bias.shape == (_groups(a), _weight(a).shape[-1])


def _shapes_match(a: Arguments) -> bool:
    x, weight = _x(a), _weight(a)
    if a["group_type"] == _BY_SUM:
        return x.dim() == 2 and weight.dim() == 2 and x.shape[1] == weight.shape[0]
    return x.dim() == 2 and weight.dim() == 3 and x.shape[1] == weight.shape[1]


def _strides_match(a: Arguments) -> bool:
    if a["group_type"] == _BY_SUM:
        return (is_transposed(_x(a)) or _x(a).numel() <= 1) and not is_transposed(_weight(a))
    return not is_transposed(_x(a))


def _rows_are_short(a: Arguments) -> bool:
    x, weight = _x(a), _weight(a)
    inner = [x.shape[0] if a["group_type"] == _BY_SUM else x.shape[1]]
    inner += [] if is_transposed(weight) else [weight.shape[-1]]
    return max(inner) <= _LONGEST_ROW


def _ends(a: Arguments) -> list[int]:
    ends: list[int] = a["group_list"].tolist()
    if a["group_list_type"] == 1:
        return torch.tensor(ends).cumsum(0).tolist()
    return ends


def _ends_cover(a: Arguments) -> bool:
    rows = _x(a).shape[1 if a["group_type"] == _BY_SUM else 0]
    ends = _ends(a)
    return all(0 <= low <= high for low, high in zip([0, *ends], ends)) and ends[-1:] == [rows]


def _output_dtype(a: Arguments) -> torch.dtype:
    given = a["output_dtype"]
    if given is None:
        return torch.int8 if _x(a).dtype == torch.int8 else _x(a).dtype
    numbers = {1: torch.int8, 5: torch.float16, 6: torch.float32, 15: torch.bfloat16, 3: torch.int32}
    return given if isinstance(given, torch.dtype) else numbers[given]


def grouped_matmul(a: Arguments) -> list[Tensor]:
    """Compute ``[m, n]``, or with the summed dimension grouped ``[E, m, n]``."""
    x, weight, dtype = _x(a), _weight(a), _output_dtype(a)
    by_sum = a["group_type"] == _BY_SUM
    shape = (_groups(a), x.shape[0], weight.shape[-1]) if by_sum else (x.shape[0], weight.shape[-1])
    result = unwritten(shape, dtype)
    if not x.numel():
        return [result]
    begin = 0
    for group, end in enumerate(_ends(a)):
        if by_sum and x.dtype in FLOAT8:
            result[group] = _sum_of_rounded(a, group, begin, end).to(dtype)
        elif by_sum:
            result[group] = (x[:, begin:end].double() @ weight[begin:end].double()).to(dtype)
        else:
            result[begin:end] = _rows(a, x[begin:end], group, slice(begin, end)).to(dtype)
        begin = end
    return [result]


def _sum_of_rounded(a: Arguments, group: int, begin: int, end: int) -> Tensor:
    """Multiply a group of the summed dimension in MX formats; pairs of exponents begin anew with it."""
    length, first = end - begin, begin // PAIR + group
    of_x = exponents_of(a["per_token_scale"][0].transpose(0, 1), length, first)
    of_weight = exponents_of(a["scale"][0], length, first)
    x, weight = _x(a)[:, begin:end], _weight(a)[begin:end]
    return widened(x, of_x.t()) @ widened(weight, of_weight)


def _rows_of_rounded(a: Arguments, x: Tensor, group: int, rows: slice) -> Tensor:
    of_x = exponents_of(a["per_token_scale"][0][rows].transpose(0, 1), x.shape[1])
    of_weight = exponents_of(a["scale"][0][group], x.shape[1])
    return widened(x, of_x.t()) @ widened(_weight(a)[group], of_weight)


def _rows(a: Arguments, x: Tensor, group: int, rows: slice) -> Tensor:
    if x.dtype in FLOAT8:
        return _rows_of_rounded(a, x, group, rows)
    weight = _weight(a)[group].double()
    if a["antiquant_scale"] is not None:
        weight = (weight + a["antiquant_offset"][0][group].double()) * a["antiquant_scale"][0][group].double()
    product = x.double() @ weight
    if a["bias"] is not None:
        product = product + a["bias"][0][group].double()
    if a["scale"] is None:
        return _ACTIVATIONS[a["act_type"]](product) if a["act_type"] else product
    product = product * _scale(a["scale"][0][group])
    if a["per_token_scale"] is not None:
        product = product * a["per_token_scale"][0][rows].double().unsqueeze(1)
    product = _ACTIVATIONS[a["act_type"]](product)
    return product.round().clamp(-128, 127) if _output_dtype(a) == torch.int8 else product


def _scale(packed: Tensor) -> Tensor:
    """Read a scale; packed ones hold a float32 in the low half of 64 bits."""
    if packed.dtype != torch.int64:
        return packed.double()
    return packed.contiguous().view(torch.float32)[::2].double()


GROUPED_MATMUL = Kernel(
    "npu::npu_grouped_matmul",
    rules=(
        Rule(
            "one x, one weight, split_item 2 or 3, group_type 0 or 2, group_list_type 0 or 1",
            lambda a: (
                len(a["x"]) == len(a["weight"]) == 1
                and a["split_item"] in (2, 3)
                and a["group_type"] in (_BY_ROWS, _BY_SUM)
                and a["group_list_type"] in (0, 1)
            ),
        ),
        Rule(
            "x and weight of one dtype of the generation, half precision with int8, or float8 on 950",
            _dtypes_match,
        ),
        Rule("x [m, k] and weight [E, k, n]; with group_type 2 x [m, k] and weight [k, n]", _shapes_match),
        Rule("x is transposed with group_type 2 and never with group_type 0", _strides_match),
        Rule("rows that lie behind one another have at most 65535 numbers", _rows_are_short),
        Rule(
            "group_list is int64 [E], 2 to 1024 groups",
            lambda a: (
                a["group_list"].dtype == torch.int64
                and a["group_list"].shape == (_groups(a),)
                and 1 < _groups(a) <= _MOST_GROUPS
            ),
        ),
        Rule(
            "group_list ascends from 0 to the rows there are (not checked by the device)",
            _ends_cover,
            of_values=True,
        ),
        Rule("quantized operands come with their own options only", _options_match),
        Rule("bias is [E, n] in x's dtype; float32 for bfloat16, int32 for int8", _bias_matches),
        Rule(
            "an activation only with quantized operands",
            lambda a: not a["act_type"] or _x(a).dtype == torch.int8,
        ),
    ),
    compute=grouped_matmul,
    sources=(
        ops_transformer("gmm/grouped_matmul/op_host/op_api/aclnn_grouped_matmul.cpp"),
        ops_transformer("gmm/grouped_matmul/op_kernel/grouped_matmul.cpp"),
        later_ops_transformer(
            "gmm/grouped_matmul/op_host/op_api/aclnn_grouped_matmul_DAV_3510_checker.cpp", "5ddb9b96"
        ),
        later_ops_transformer(
            "gmm/grouped_matmul/op_kernel/arch35/quant_adaptive_sliding_window_templates/gqmm_init_output.h",
            "288b6b0e",
        ),
        op_plugin("op_plugin/ops/opapi/GroupedMatmulKernelNpuOpApi.cpp"),
    ),
    unwritten="the whole result when x has no element: the call succeeds and nothing is launched",
    differs=(
        "group_type has no default that works; with group_type 2 the result is [E, m, n]",
        "a bias for bfloat16 operands is float32",
        "float8 comes with exponents in pairs for 64 numbers (E8M0), transposed where the operand is",
    ),
)


def _add_shapes_match(a: Arguments) -> bool:
    y, x, weight = a["input"], a["x"], a["weight"]
    groups = a["group_list"].numel()
    return (
        x.dim() == weight.dim() == 2
        and x.shape[0] == weight.shape[0]
        and y.numel() == groups * x.shape[1] * weight.shape[1]
        and y.shape[-1] == weight.shape[1]
    )


def grouped_matmul_add(a: Arguments) -> Tensor:
    """Add ``x_eᵀ · weight_e`` to part ``e`` of ``input``, in place."""
    y: Tensor = a["input"]
    x, weight = a["x"], a["weight"]
    parts = y.view(-1, x.shape[1], weight.shape[1])
    begin = 0
    for part, end in zip(parts, a["group_list"].tolist()):
        part.copy_((part.double() + x[begin:end].double().t() @ weight[begin:end].double()).to(part.dtype))
        begin = end
    return y


GROUPED_MATMUL_ADD = Kernel(
    "npu::npu_grouped_matmul_add_",
    rules=(
        both_half("x", "weight"),
        accumulated("input"),
        Rule("group_list is int64 [E], running ends",
             lambda a: a["group_list"].dtype == torch.int64 and a["group_list"].dim() == 1
             and a["group_list_type"] in (0, None)),
        Rule("transpose_x, not transpose_weight, group_type 2",
             lambda a: a["transpose_x"] and not a["transpose_weight"] and a["group_type"] == _BY_SUM),
        Rule("x [m, k], weight [m, n] and input [E, k, n] or [E * k, n]", _add_shapes_match),
        not_empty("there are rows: what the device does without any is not published", "x", "weight"),
    ),
    compute=grouped_matmul_add,
    sources=(
        ops_transformer("gmm/grouped_matmul_add/op_host/grouped_matmul_add_def.cpp"),
        ops_transformer("gmm/grouped_matmul_add/op_host/grouped_matmul_add_tiling.cpp"),
        op_plugin("op_plugin/ops/opapi/GroupedMatmulAddNpuOpApi.cpp"),
    ),
    differs=("group_list_type is read on 950 only; elsewhere the list is always running ends",),
    socs=("910B", "910_93", "950"),
)  # fmt: skip


def matmul_add(a: Arguments) -> None:
    """Add ``xᵀ · weight`` to ``C`` in place."""
    total: Tensor = a["C"]
    total.copy_((total.double() + a["x"].double().t() @ a["weight"].double()).to(total.dtype))


MATMUL_ADD = Kernel(
    "atb::_npu_matmul_add_fp32",
    rules=(
        both_half("x", "weight"),
        accumulated("C"),
        Rule("x [m, n], weight [m, k] and C [n, k]",
             lambda a: a["x"].dim() == a["weight"].dim() == 2 and a["x"].shape[0] == a["weight"].shape[0]
             and a["C"].shape == (a["x"].shape[1], a["weight"].shape[1])),
        not_empty("there are rows", "x", "weight"),
    ),
    compute=matmul_add,
    sources=(
        atb("src/kernels/kernels/matmul/pp_matmul_accum_kernel/pp_matmul_accum_kernel.cpp"),
        op_plugin("op_plugin/ops/atb/LinearAtb.cpp"),
    ),
    differs=("x is the transposed operand: C += xᵀ · weight",),
    socs=("910B", "910_93"),
)  # fmt: skip

KERNELS = (GROUPED_MATMUL, GROUPED_MATMUL_ADD, MATMUL_ADD)
