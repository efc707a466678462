"""Grouped products with an exchange of rows between ranks (MC2): before the product, or behind it.

A number of rows goes from the tokens of each rank to each expert of each rank. Every rank sees the rows of
all of them here, and picks its own.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_testing.npu.kernels.communicators import gather_from_ranks, group_of
from mindspeed_testing.npu.kernels.contract import Arguments, Kernel, KernelRefusal, Rule
from mindspeed_testing.npu.kernels.repositories import later_ops_transformer, op_plugin, ops_transformer
from mindspeed_testing.npu.kernels.rules import HALF

_RANKS = {"910_93": (8, 16, 32, 64), "950": (4, 8, 16, 32, 64)}
_EXPERTS, _EXPERTS_OF_ALL = 32, 256
_WIDEST, _WIDEST_SHARED, _MOST_ROWS = 65535, 12288, 52428799
_LEAST_BYTES, _MOST_BYTES = 2 * 2**20, 100 * 2**20
_SOCS = ("910_93", "950")


def _columns(a: Arguments) -> int:
    return int(a["gmm_weight"].shape[1 if a["trans_gmm_weight"] else 2])


def _summed_width(a: Arguments) -> int:
    return int(a["gmm_weight"].shape[2 if a["trans_gmm_weight"] else 1])


def _operands_match(a: Arguments) -> bool:
    x, weight = a["gmm_x"], a["gmm_weight"]
    return (
        (x.dim(), weight.dim()) == (2, 3)
        and x.dtype in HALF
        and weight.dtype == x.dtype
        and x.shape[1] == _summed_width(a)
    )


def _counts_match(a: Arguments) -> bool:
    experts = a["gmm_weight"].shape[0]
    entries = experts * a["ep_world_size"]
    return (
        0 < experts <= _EXPERTS
        and entries <= _EXPERTS_OF_ALL
        and all(len(a[n]) == entries and min(a[n]) >= 0 for n in ("send_counts", "recv_counts"))
    )


def _pairs_match(a: Arguments) -> bool:
    experts, width = a["gmm_weight"].shape[0], a["gmm_x"].shape[1]
    return all(
        _LEAST_BYTES <= 2 * width * sum(a[name][first : first + experts]) <= _MOST_BYTES
        for name in ("send_counts", "recv_counts")
        for first in range(0, len(a[name]), experts)
    )


def _shared_matches(a: Arguments, tokens: str) -> bool:
    x, weight = a["mm_x"], a["mm_weight"]
    if x is None or weight is None:
        return x is weight and not a["trans_mm_weight"]
    rows, (wide, columns) = sum(a[tokens]), reversed(weight.shape) if a["trans_mm_weight"] else weight.shape
    return (
        x.dim() == 2
        and {x.dtype, weight.dtype} == {a["gmm_x"].dtype}
        and x.shape[1] == wide
        and 0 < wide <= _WIDEST_SHARED
        and 0 < columns <= _WIDEST
        and x.shape[0] > 0
        and rows % x.shape[0] == 0
        and 2 <= rows // x.shape[0] <= 8
    )


def _rules(tokens: str) -> tuple[Rule, ...]:
    """Return what both kernels ask for; ``tokens`` names the counts of this rank's tokens."""
    return (
        Rule("gmm_x [m, k] and gmm_weight [e, k, n] both float16 or both bfloat16", _operands_match),
        Rule(
            "no tensors of counts, no comm_mode",
            lambda a: a["send_counts_tensor"] is a["recv_counts_tensor"] is a["comm_mode"] is None,
        ),
        Rule(
            "4, 8, 16, 32 or 64 ranks, at least 8 before 950", lambda a: a["ep_world_size"] in _RANKS[a.soc]
        ),
        Rule(
            "ep_world_size is that of the communicator",
            lambda a: a["ep_world_size"] == group_of(a["hcom"]).size(),
        ),
        Rule("counts for up to 32 experts of each rank, 256 in all, none negative", _counts_match),
        Rule("send_counts cover the rows there are", lambda a: sum(a["send_counts"]) == a["gmm_x"].shape[0]),
        Rule(
            "every rank sends and receives 1 to 52428799 rows",
            lambda a: all(0 < sum(a[name]) <= _MOST_ROWS for name in ("send_counts", "recv_counts")),
        ),
        Rule(
            "rows and results are 1 to 65535 wide",
            lambda a: 0 < _summed_width(a) <= _WIDEST and 0 < _columns(a) <= _WIDEST,
        ),
        Rule("2 to 100 MiB of gmm_x's width go to, and come from, each rank", _pairs_match, ("910_93",)),
        Rule(
            "mm_x [b, h] and mm_weight [h, o] in gmm_x's dtype, h up to 12288; 2 to 8 rows of tokens for "
            "each of mm_x",
            lambda a: _shared_matches(a, tokens),
        ),
    )


def _of_all(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the tensors of every rank, whose first dimensions may differ."""
    sizes = gather_from_ranks(torch.tensor([x.shape[0]]), group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, *x.shape[1:], dtype=x.dtype)
    padded[: x.shape[0]] = x
    found = gather_from_ranks(padded, group)
    return [tensor[: int(size)] for tensor, size in zip(found, sizes)]


def _counts_of_all(a: Arguments, group: dist.ProcessGroup) -> Tensor:
    """Return how many rows each rank sends, ``[from, with, expert]``, after a check of what is received."""
    sent, received = (
        torch.stack(_of_all(torch.tensor(a[n]), group)).view(group.size(), group.size(), -1)
        for n in ("send_counts", "recv_counts")
    )
    if not torch.equal(received, sent.transpose(0, 1)):
        raise KernelRefusal("recv_counts are not what the ranks send (not checked by the device)")
    return sent


def _shared(a: Arguments) -> Tensor | None:
    if a["mm_x"] is None:
        return None
    weight = a["mm_weight"].t() if a["trans_mm_weight"] else a["mm_weight"]
    return (a["mm_x"].double() @ weight.double()).to(a["gmm_x"].dtype)


def _weights(a: Arguments) -> Tensor:
    weight: Tensor = a["gmm_weight"].double()
    return weight.transpose(1, 2) if a["trans_gmm_weight"] else weight


def alltoallv_gmm(a: Arguments) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return ``[received, n]``, the shared product, and rows ``[received, k]``, by expert, then sender."""
    group = group_of(a["hcom"])
    counts, me = _counts_of_all(a, group), group.rank()
    rows, products = [], []
    everyone = _of_all(a["gmm_x"], group)
    for expert, weight in enumerate(_weights(a)):
        for rank, x in enumerate(everyone):
            before = int(counts[rank].flatten()[: me * counts.shape[2] + expert].sum())
            rows.append(x[before : before + int(counts[rank, me, expert])])
            products.append(rows[-1].double() @ weight)
    dtype = a["gmm_x"].dtype
    return torch.cat(products).to(dtype), _shared(a), torch.cat(rows) if a["permute_out_flag"] else None


def gmm_alltoallv(a: Arguments) -> tuple[Tensor, Tensor | None]:
    """Return ``[received, n]`` by the rank that multiplied, then expert, and the shared product."""
    group = group_of(a["hcom"])
    counts, me = _counts_of_all(a, group), group.rank()
    own = counts[me].sum(0).tolist()
    products = [x.double() @ weight for x, weight in zip(a["gmm_x"].split(own), _weights(a))]
    pieces = []
    for rank, y in enumerate(_of_all(torch.cat(products), group)):
        for expert in range(counts.shape[2]):
            before = int(counts[rank, :, :expert].sum() + counts[rank, :me, expert].sum())
            pieces.append(y[before : before + int(counts[rank, me, expert])])
    return torch.cat(pieces).to(a["gmm_x"].dtype), _shared(a)


_DIFFERS = (
    "rows of tokens lie by rank, then number, of their expert; those of experts by expert, then by rank",
    "results that are not asked for are None",
    "with any rank that is refused, the others wait for it: limits have to be judged for all of them",
)
ALLTOALLV_GMM = Kernel(
    "npu::npu_alltoallv_gmm",
    rules=_rules("send_counts"),
    compute=alltoallv_gmm,
    sources=(
        ops_transformer(
            "mc2/allto_allv_grouped_mat_mul/op_host/op_tiling/allto_allv_grouped_mat_mul_tiling.cpp"
        ),
        ops_transformer(
            "mc2/allto_allv_grouped_mat_mul/op_kernel/allto_allv_grouped_mat_mul_coarse_grained.h"
        ),
        later_ops_transformer(
            "mc2/allto_allv_grouped_mat_mul/op_host/op_tiling/allto_allv_grouped_mat_mul_tiling_base.cpp",
            "01a9ada1",
        ),
        later_ops_transformer(
            "mc2/allto_allv_grouped_mat_mul/docs/aclnnAlltoAllvGroupedMatMul.md", "08dee71d"
        ),
        op_plugin("op_plugin/ops/opapi/AllToAllvGmmNpuOpApi.cpp"),
    ),
    differs=_DIFFERS,
    socs=_SOCS,
)
GMM_ALLTOALLV = Kernel(
    "npu::npu_gmm_alltoallv",
    rules=_rules("recv_counts"),
    compute=gmm_alltoallv,
    sources=(
        ops_transformer(
            "mc2/grouped_mat_mul_allto_allv/op_host/op_tiling/grouped_mat_mul_allto_allv_tiling.cpp"
        ),
        ops_transformer("mc2/grouped_mat_mul_allto_allv/op_kernel/grouped_mat_mul_allto_allv.h"),
        later_ops_transformer(
            "mc2/grouped_mat_mul_allto_allv/op_host/op_tiling/grouped_mat_mul_allto_allv_tiling.cpp",
            "01dd63b9",
        ),
        later_ops_transformer(
            "mc2/grouped_mat_mul_allto_allv/docs/aclnnGroupedMatMulAlltoAllv.md", "08dee71d"
        ),
        op_plugin("op_plugin/ops/opapi/GmmAllToAllvNpuOpApi.cpp"),
    ),
    differs=_DIFFERS,
    socs=_SOCS,
)

KERNELS = (ALLTOALLV_GMM, GMM_ALLTOALLV)
