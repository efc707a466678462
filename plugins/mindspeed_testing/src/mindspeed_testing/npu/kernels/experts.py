"""Sorting tokens by expert and back, with the gradients of both."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_testing.npu.kernels.contract import Arguments, Kernel, Rule, unwritten
from mindspeed_testing.npu.kernels.repositories import op_plugin, ops_transformer
from mindspeed_testing.npu.kernels.rules import FLOATING, not_empty, of_dtypes, off

_TRAINING = ("910B", "910_93", "950")
_MOST_COPIES, _MOST_INDICES = 512, 16777215


def _copies(indices: Tensor) -> int:
    return 1 if indices.dim() == 1 else indices.shape[1]


def _kept(total: int, asked: int | None) -> int:
    if not asked:
        return total
    return min(asked, total) if asked > 0 else max(total + asked, 0)


def token_permute(a: Arguments) -> tuple[Tensor, Tensor]:
    """Return the sorted copies, and int32 where each copy went."""
    tokens, indices = a["tokens"], a["indices"]
    flat = indices.reshape(-1).tolist()
    order = sorted(range(len(flat)), key=flat.__getitem__)
    where = torch.empty(len(flat), dtype=torch.int32)
    where[order] = torch.arange(len(flat), dtype=torch.int32)
    kept = order[: _kept(len(flat), a["num_out_tokens"])]
    rows = torch.tensor(kept, dtype=torch.int64) // _copies(indices)
    return tokens[rows], where


def token_permute_grad(a: Arguments) -> Tensor:
    """Return the sum of the gradients of a token's copies."""
    gradient, where, copies = a["grad_permuted_tokens"], a["sorted_indices"], a["num_topK"]
    result = torch.zeros(a["tokens_size_0"], gradient.shape[1], dtype=torch.float64)
    for copy, row in enumerate(where.tolist()):
        if row < gradient.shape[0]:
            result[copy // copies] += gradient[row].double()
    return result.to(a["tokens_dtype"])


def token_unpermute(a: Arguments) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of each token's rows, and the rows for backward."""
    rows, where, probs = a["permuted_tokens"], a["sorted_indices"].tolist(), a["probs"]
    copies = 1 if probs is None else probs.shape[1]
    result = torch.zeros(len(where) // copies, rows.shape[1], dtype=torch.float64)
    for copy, row in enumerate(where):
        if row < rows.shape[0]:
            weight = 1.0 if probs is None else probs.reshape(-1)[copy].double()
            result[copy // copies] += weight * rows[row].double()
    return result.to(rows.dtype), rows


def token_unpermute_grad(a: Arguments) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows and probabilities; without probabilities the second is not written."""
    gradient, where, probs = a["grad_unpermuted_tokens"].double(), a["sorted_indices"].tolist(), a["probs"]
    count, dtype = a["permuted_tokens_size_0"], a["permuted_tokens_dtype"]
    copies = 1 if probs is None else probs.shape[1]
    to_rows = unwritten((count, gradient.shape[1]), dtype)
    shape = (len(where),) if probs is None else tuple(probs.shape)
    to_probs = unwritten(shape, a["grad_unpermuted_tokens"].dtype if probs is None else probs.dtype)
    for copy, row in enumerate(where):
        weight = 1.0 if probs is None else probs.reshape(-1)[copy].double()
        if row < count:
            to_rows[row] = (weight * gradient[copy // copies]).to(dtype)
        if probs is not None:
            kept = a["permuted_tokens"][row].double() if row < count else torch.zeros(gradient.shape[1])
            to_probs.view(-1)[copy] = (kept.double() @ gradient[copy // copies]).to(probs.dtype)
    return to_rows, to_probs


_NOT_PADDED = off("padded_mode")
_INT32 = of_dtypes("sorted_indices", 1, "sorted_indices is int32 [T * k]", (torch.int32,))
_PROBS = Rule(
    "probs is [T, k], k at most 512, floating",
    lambda a: (
        a["probs"] is None
        or (
            a["probs"].dim() == 2
            and a["probs"].dtype in FLOATING
            and a["probs"].numel() == a["sorted_indices"].numel()
            and a["probs"].shape[1] <= _MOST_COPIES
        )
    ),
)
_HAS_ROWS = not_empty("there are tokens: without any nothing is promised", "sorted_indices")

PERMUTE = Kernel(
    "npu::npu_moe_token_permute",
    rules=(
        _NOT_PADDED,
        of_dtypes("tokens", 2, "tokens [T, h] floating or int8", (*FLOATING, torch.int8)),
        Rule("indices int32 or int64, [T] or [T, k], k at most 512",
             lambda a: a["indices"].dtype in (torch.int32, torch.int64) and a["indices"].dim() in (1, 2)
             and a["indices"].shape[0] == a["tokens"].shape[0] and _copies(a["indices"]) <= _MOST_COPIES),
        Rule("fewer than 16777215 indices",
             lambda a: 0 < a["indices"].numel() < _MOST_INDICES),
        Rule("indices lie in [0, 16777215): others are sorted wrongly, unsaid",
             lambda a: bool((a["indices"] >= 0).all() and (a["indices"] < _MOST_INDICES).all()),
             of_values=True),
    ),
    compute=token_permute,
    sources=(
        ops_transformer("moe/moe_token_permute/op_host/moe_token_permute_def.cpp"),
        ops_transformer("moe/moe_token_permute/README.md"),
    ),
    socs=_TRAINING,
)  # fmt: skip
PERMUTE_GRAD = Kernel(
    "npu::npu_moe_token_permute_grad_v2",
    rules=(_NOT_PADDED, _INT32, of_dtypes("grad_permuted_tokens", 2, "floating gradients")),
    compute=token_permute_grad,
    sources=(
        ops_transformer("moe/moe_token_permute_grad/op_host/moe_token_permute_grad_def.cpp"),
        op_plugin("op_plugin/config/op_plugin_functions.yaml"),
    ),
    socs=_TRAINING,
)  # fmt: skip
UNPERMUTE = Kernel(
    "npu::_npu_moe_token_unpermute",
    rules=(
        _NOT_PADDED,
        _INT32,
        _PROBS,
        _HAS_ROWS,
        of_dtypes("permuted_tokens", 2, "permuted_tokens [rows, h] floating"),
    ),
    compute=token_unpermute,
    sources=(
        ops_transformer("moe/moe_token_unpermute/op_host/moe_token_unpermute_def.cpp"),
        ops_transformer("moe/moe_token_unpermute/op_kernel/moe_token_unpermute.h"),
        op_plugin("op_plugin/ops/opapi/MoeTokenUnpermuteKernelNpuOpApi.cpp"),
    ),
    differs=("rows beyond those that were kept count as zero",),
    socs=_TRAINING,
)  # fmt: skip
UNPERMUTE_GRAD = Kernel(
    "npu::npu_moe_token_unpermute_grad_v2",
    rules=(_NOT_PADDED, _INT32, _PROBS, _HAS_ROWS),
    compute=token_unpermute_grad,
    sources=(
        ops_transformer("moe/moe_token_unpermute_grad/op_host/moe_token_unpermute_grad_def.cpp"),
        op_plugin("op_plugin/config/op_plugin_functions.yaml"),
    ),
    unwritten="the gradient of probabilities where there are none",
    socs=_TRAINING,
)

KERNELS = (PERMUTE, PERMUTE_GRAD, UNPERMUTE, UNPERMUTE_GRAD)
