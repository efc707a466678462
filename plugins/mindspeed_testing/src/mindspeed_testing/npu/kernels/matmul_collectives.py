"""Products with built-in communication (MC2): gather before, or sum or scatter after the product."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_testing.npu.kernels.communicators import gather_from_ranks, group_of, sum_over_ranks
from mindspeed_testing.npu.kernels.contract import Arguments, Kernel, Rule, unwritten
from mindspeed_testing.npu.kernels.grouped_matmul import is_transposed
from mindspeed_testing.npu.kernels.repositories import op_plugin, ops_transformer
from mindspeed_testing.npu.kernels.rules import HALF, not_empty

_RANKS = {"910B": (2, 4, 8), "910_93": (2, 4, 8, 16, 32), "950": (2, 4, 8, 16, 32)}
_LEAST_K, _MOST_K = 256, 65535


def _half(a: Arguments, x: str) -> bool:
    allowed = (torch.float16,) if a.soc == "310P" else HALF
    return a[x].dtype in allowed and a["x2"].dtype == a[x].dtype


def _product_fits(a: Arguments, x: str) -> bool:
    return a["x2"].dim() == 2 and a[x].shape[-1] == a["x2"].shape[0]


_COMMON = (
    Rule("input and x2 both float16 or both bfloat16", lambda a: _half(a, "input")),
    Rule(
        "input [m, k], not transposed, and x2 [k, n]",
        lambda a: a["input"].dim() == 2 and _product_fits(a, "input") and not is_transposed(a["input"]),
    ),
    Rule("k is in [256, 65535)", lambda a: _LEAST_K <= a["x2"].shape[0] < _MOST_K),
    Rule("2, 4 or 8 ranks; also 16 and 32 from 910_93 on", lambda a: a["world_size"] in _RANKS[a.soc]),
    Rule("world_size is that of the communicator", lambda a: a["world_size"] == group_of(a["hcom"]).size()),
    Rule("no bias: other than zeros it is not computed", lambda a: a["bias"] is None),
    Rule(
        "comm_turn 0 and no quantization",
        lambda a: not a["comm_turn"] and a["x1_scale"] is None and a["x2_scale"] is None,
    ),
)


def _summed(x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.double() @ weight.double()
    sum_over_ranks(total, group)
    return total


def all_gather_matmul(a: Arguments) -> tuple[Tensor, Tensor]:
    """Return ``[w * m, n]`` and the gathered rows ``[w * m, k]``."""
    x, weight, group = a["input"], a["x2"], group_of(a["hcom"])
    rows = x.shape[0] * group.size()
    if not x.numel():
        return unwritten((rows, weight.shape[1]), x.dtype), unwritten((rows, x.shape[1]), x.dtype)
    gathered = torch.cat(gather_from_ranks(x.contiguous(), group))
    return (gathered.double() @ weight.double()).to(x.dtype), gathered


def matmul_reduce_scatter(a: Arguments) -> Tensor:
    """Return this rank's rows ``[m / w, n]`` of the sum."""
    x, weight, group = a["input"], a["x2"], group_of(a["hcom"])
    rows = x.shape[0] // group.size()
    if not x.numel() or not weight.numel():
        return unwritten((rows, weight.shape[1]), x.dtype)
    return _summed(x, weight, group).view(group.size(), rows, -1)[group.rank()].to(x.dtype)


def _all_int8(a: Arguments) -> bool:
    return bool(a["x1"].dtype == torch.int8)


def _sum_dtypes_match(a: Arguments) -> bool:
    if _all_int8(a):
        return a["x2"].dtype == torch.int8
    return a["x1"].dtype in HALF and a["x2"].dtype in (a["x1"].dtype, torch.int8)


def _sum_options_match(a: Arguments) -> bool:
    widened = [a["antiquant_scale"], a["antiquant_offset"]]
    if _all_int8(a):
        return a["dequant_scale"] is not None and widened == [None, None]
    if a["dequant_scale"] is not None or a["pertoken_scale"] is not None:
        return False
    if a["x2"].dtype != torch.int8:
        return widened == [None, None]
    tables = [table for table in widened if table is not None]
    return a["antiquant_scale"] is not None and all(
        table.dtype == a["x1"].dtype and table.shape == a["antiquant_scale"].shape for table in tables
    )


def _group_size_matches(a: Arguments) -> bool:
    size = a["antiquant_group_size"]
    return size == 0 or (size % 32 == 0 and 32 <= size < a["x2"].shape[0])


def _bias_matches(a: Arguments) -> bool:
    if a["bias"] is None:
        return True
    wanted = torch.int32 if _all_int8(a) else a["x1"].dtype
    return a["bias"].shape == a["x2"].shape[1:] and a["bias"].dtype == wanted


def matmul_all_reduce(a: Arguments) -> Tensor:
    """Return ``[..., n]``, the sum over ranks of the product with its bias."""
    x, weight, dtype = a["x1"].double(), a["x2"].double(), a["x1"].dtype
    if a["antiquant_scale"] is not None:
        rows = weight.shape[0]
        offset = 0.0 if a["antiquant_offset"] is None else _by_row(a, a["antiquant_offset"], rows)
        weight = (weight + offset) * _by_row(a, a["antiquant_scale"], rows)
    total = x @ weight
    if a["bias"] is not None:
        total = total + a["bias"].double()
    if _all_int8(a):
        scale = a["dequant_scale"]
        packed = scale.dtype == torch.int64
        dtype = torch.bfloat16 if scale.dtype == torch.bfloat16 else torch.float16
        total = total * (scale.contiguous().view(torch.float32)[..., ::2] if packed else scale).double()
        if a["pertoken_scale"] is not None:
            total = total * a["pertoken_scale"].double().view(*x.shape[:-1], 1)
    total = total.contiguous()
    sum_over_ranks(total, group_of(a["hcom"]))
    return (total if a["x3"] is None else total + a["x3"].double()).to(dtype)


def _by_row(a: Arguments, table: Tensor, rows: int) -> Tensor:
    size = a["antiquant_group_size"]
    return table.double().repeat_interleave(size, 0)[:rows] if size else table.double()


ALL_GATHER_MATMUL = Kernel(
    "npu::npu_all_gather_base_mm",
    rules=(*_COMMON, Rule("gather_index is 0", lambda a: a["gather_index"] == 0)),
    compute=all_gather_matmul,
    sources=(
        ops_transformer("mc2/all_gather_matmul/op_host/op_api/aclnn_all_gather_matmul.cpp"),
        ops_transformer("mc2/all_gather_matmul/docs/aclnnAllGatherMatmul.md"),
    ),
    unwritten="both results when input has no row: the call succeeds and nothing is launched",
    socs=("910B", "910_93", "950"),
)
MATMUL_REDUCE_SCATTER = Kernel(
    "npu::npu_mm_reduce_scatter_base",
    rules=(
        *_COMMON,
        Rule("m is a multiple of the ranks", lambda a: a["input"].shape[0] % a["world_size"] == 0),
        Rule("reduce_op is sum", lambda a: a["reduce_op"] == "sum"),
    ),
    compute=matmul_reduce_scatter,
    sources=(
        ops_transformer("mc2/matmul_reduce_scatter/op_host/op_api/aclnn_matmul_reduce_scatter.cpp"),
        ops_transformer("mc2/matmul_reduce_scatter/docs/aclnnMatmulReduceScatter.md"),
    ),
    unwritten="the result when an operand has no element",
    socs=("910B", "910_93", "950"),
)
MATMUL_ALL_REDUCE = Kernel(
    "npu::npu_mm_all_reduce_base",
    rules=(
        Rule("float16 or bfloat16, with x2 of x1's dtype or int8; or both int8", _sum_dtypes_match),
        Rule("x1 [m, k] or [b, s, k], not transposed, and x2 [k, n]",
             lambda a: a["x1"].dim() in (2, 3) and _product_fits(a, "x1") and not is_transposed(a["x1"])),
        not_empty("operands have elements", "x1", "x2"),
        Rule("1, 2, 4 or 8 ranks", lambda a: group_of(a["hcom"]).size() in (1, 2, 4, 8)),
        Rule("bias is [n] in x1's dtype, int32 for int8", _bias_matches),
        Rule("quantized operands come with their own scales", _sum_options_match),
        Rule("antiquant_group_size is 0 or a multiple of 32 below k", _group_size_matches),
        Rule("reduce_op is sum and comm_turn 0", lambda a: a["reduce_op"] == "sum" and not a["comm_turn"]),
        Rule("communication is not quantized",
             lambda a: a["comm_quant_scale_1"] is None and a["comm_quant_scale_2"] is None),
    ),
    compute=matmul_all_reduce,
    sources=(
        ops_transformer("mc2/matmul_all_reduce/op_host/matmul_all_reduce_def.cpp"),
        ops_transformer("mc2/matmul_all_reduce/op_host/op_api/matmul_all_reduce_util.cpp"),
        ops_transformer("mc2/matmul_all_reduce/docs/aclnnQuantMatmulAllReduce.md"),
        op_plugin("docs/zh/custom_APIs/torch_npu/torch_npu-npu_mm_all_reduce_base.md"),
    ),
    differs=("every rank adds the bias, so that it counts once per rank",),
    socs=("910B",),
)  # fmt: skip

KERNELS = (ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER, MATMUL_ALL_REDUCE)
