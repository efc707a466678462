"""The loss that trains the indexer of sparse attention, with its gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_testing.npu.kernels.contract import Arguments, Kernel, Rule, Source
from mindspeed_testing.npu.kernels.repositories import later_ops_transformer, op_plugin
from mindspeed_testing.npu.kernels.rules import HALF, of_dtypes, one_dtype

_FOLDER = "attention/sparse_lightning_indexer_grad_kl_loss"
_HEADS, _INDEX_HEADS, _SMALLEST = (32, 64, 128), (8, 16, 32, 64), 1e-8
_OPERANDS = ("query", "key", "query_index", "key_index", "query_rope", "key_rope")
_STATISTICS = ("softmax_max", "softmax_sum")


def _source(path: str, commit: str) -> Source:
    return later_ops_transformer(f"{_FOLDER}/{path}", commit)


def _count(a: Arguments, row: int) -> int:
    """Return how many leading places of a query are read."""
    seen = a["key"].shape[1] - a["query"].shape[1] + row + 1
    return min(int(a["sparse_indices"].shape[-1]), seen)


def loss(a: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the indexer's query, key and weights, and the loss, summed over queries."""
    query = torch.cat([a["query"], a["query_rope"]], -1).double()
    key = torch.cat([a["key"], a["key_rope"]], -1).double()
    index, index_key, weights = (a[name].double() for name in ("query_index", "key_index", "weights"))
    of_index, of_key, of_weights = (torch.zeros_like(one) for one in (index, index_key, weights))
    total = torch.zeros(1, dtype=torch.float64)
    for b in range(query.shape[0]):
        for row in range(query.shape[1]):
            places = a["sparse_indices"][b, row, 0, : _count(a, row)].long()
            highest, whole = (a[name][b, 0, row].double().unsqueeze(1) for name in _STATISTICS)
            logits = a["scale_value"] * query[b, row] @ key[b, places, 0].T
            p = (torch.exp(logits - highest) / whole).sum(0) / query.shape[2]
            products = index[b, row] @ index_key[b, places, 0].T
            scores = weights[b, row] @ products.clamp(min=0)
            q = torch.exp(scores - scores.max())
            q = q / q.sum()
            low_p, low_q = p.clamp(min=_SMALLEST), q.clamp(min=_SMALLEST)
            total += (low_p * (low_p.log() - low_q.log())).sum()
            slope = q - p
            of_weights[b, row] = products.clamp(min=0) @ slope
            inner = weights[b, row].unsqueeze(1) * slope * (products > 0)
            of_index[b, row] = inner @ index_key[b, places, 0]
            of_key[b, :, 0].index_add_(0, places, inner.T @ index[b, row])
    dtype = a["query_index"].dtype
    return of_index.to(dtype), of_key.to(dtype), of_weights.to(a["weights"].dtype), total.float()


def _shapes(a: Arguments) -> bool:
    batch, rows, heads, _ = a["query"].shape
    keys, index_heads = a["key"].shape[1], a["query_index"].shape[2]
    return {name: tuple(a[name].shape) for name in _OPERANDS} == {
        "query": (batch, rows, heads, 512),
        "key": (batch, keys, 1, 512),
        "query_index": (batch, rows, index_heads, 128),
        "key_index": (batch, keys, 1, 128),
        "query_rope": (batch, rows, heads, 64),
        "key_rope": (batch, keys, 1, 64),
    } and tuple(a["weights"].shape) == (batch, rows, index_heads)


def _within(a: Arguments) -> bool:
    places, keys, rows = a["sparse_indices"], a["key"].shape[1], a["query"].shape[1]
    for row in range(rows):
        part = places[:, row, :, : _count(a, row)]
        if not bool((part >= 0).all() and (part <= keys - rows + row).all()):
            return False
    return True


LOSS = Kernel(
    "npu::npu_sparse_lightning_indexer_grad_kl_loss",
    rules=(
        Rule("layout is BSND, without lengths and sinks: the contract of others is not written",
             lambda a: a["layout"] == "BSND" and a["sinks"] is None
             and a["actual_seq_qlen"] is None and a["actual_seq_klen"] is None),
        Rule("sparse_mode is 3", lambda a: a["sparse_mode"] == 3),
        Rule("query_rope and key_rope are given",
             lambda a: a["query_rope"] is not None and a["key_rope"] is not None),
        *(of_dtypes(name, 4, f"{name} float16 or bfloat16 with four dimensions", HALF) for name in _OPERANDS),
        one_dtype(*_OPERANDS),
        Rule("weights have the dtype of query or are float32",
             lambda a: a["weights"].dtype in (a["query"].dtype, torch.float32)),
        of_dtypes("sparse_indices", 4, "sparse_indices [B, S1, 1, K] int32", (torch.int32,)),
        *(of_dtypes(name, 4, f"{name} [B, 1, S1, N] float32", (torch.float32,)) for name in _STATISTICS),
        Rule("widths are 512, 128 for the indexer and 64 for ropes; one key for all heads", _shapes),
        Rule("32, 64 or 128 heads; 8, 16, 32 or 64 of the indexer",
             lambda a: a["query"].shape[2] in _HEADS and a["query_index"].shape[2] in _INDEX_HEADS),
        Rule("statistics have batch, queries and heads of query",
             lambda a: all(tuple(a[name].shape) == (a["query"].shape[0], 1, *a["query"].shape[1:3])
                           for name in _STATISTICS)),
        Rule("K is a multiple of 1024 up to 8192",
             lambda a: tuple(a["sparse_indices"].shape[:3]) == (*a["query"].shape[:2], 1)
             and a["sparse_indices"].shape[3] in range(1024, 8193, 1024)),
        Rule("at least as many keys as queries", lambda a: a["key"].shape[1] >= a["query"].shape[1] > 0),
        Rule("tensors are contiguous",
             lambda a: all(a[name].is_contiguous()
                           for name in (*_OPERANDS, *_STATISTICS, "weights", "sparse_indices"))),
        Rule("places that a query sees come first and are of keys that it sees (not checked by the device)",
             _within, of_values=True),
    ),
    compute=loss,
    sources=(
        _source("op_host/arch22/sparse_lightning_indexer_grad_kl_loss_tiling_general.cpp", "7f27c36d"),
        _source("op_kernel/arch22/sparse_lightning_indexer_grad_kl_loss_vector.h", "69090d68"),
        _source("docs/aclnnSparseLightningIndexerGradKLLoss_en.md", "827a6040"),
        op_plugin("op_plugin/ops/opapi/SparseLightningIndexerGradKLLossKernelNpuOpApi.cpp"),
    ),
    differs=(
        "the loss is a sum over queries; probabilities below 1e-8 count as that in it, not in the gradients",
        "the probabilities of attention are as the statistics say, not normalised again",
    ),
    socs=("910B", "910_93"),
)  # fmt: skip

KERNELS = (LOSS,)
