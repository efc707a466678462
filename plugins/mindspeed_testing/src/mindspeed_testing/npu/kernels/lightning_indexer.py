"""The indexer of sparse attention, forward and backward, for sequences of one length."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_testing.npu.kernels.contract import Arguments, Kernel, Rule, Source
from mindspeed_testing.npu.kernels.repositories import op_plugin
from mindspeed_testing.npu.kernels.rules import HALF, of_dtypes, one_dtype

_READ = "2026-11-23"
_ALL = 2**63 - 1
_WIDTH = 128
_FORWARD, _BACKWARD = ("910B", "910_93", "950"), ("910B", "910_93")
_HEADS_OF_950 = (8, 16, 24, 32, 64)


def _ops_transformer(path: str, commit: str) -> Source:
    return Source("ops-transformer", path, commit, _READ)


def _seen(a: Arguments, row: int) -> int:
    """Return how many keys, the first ones, a query sees."""
    rows, keys = a["query"].shape[1], a["key"].shape[1]
    return keys if a["sparse_mode"] == 0 else max(0, min(keys, keys - rows + row + 1))


def index(a: Arguments) -> tuple[Tensor, Tensor]:
    """Return places and scores of the chosen keys, -1 and -inf where there are no more."""
    query, key, weights = a["query"].double(), a["key"].double(), a["weights"].double()
    batch, rows, _, _ = query.shape
    count = a["sparse_count"]
    places = torch.full((batch, rows, 1, count), -1, dtype=torch.int32)
    values = torch.full((batch, rows, 1, count), float("-inf"), dtype=torch.float64)
    for b in range(batch):
        for row in range(rows):
            seen = key[b, : _seen(a, row), 0]
            scores = weights[b, row] @ (query[b, row] @ seen.T).clamp(min=0)
            kept = torch.argsort(scores, descending=True, stable=True)[:count]
            places[b, row, 0, : len(kept)] = kept.to(torch.int32)
            values[b, row, 0, : len(kept)] = scores[kept]
    if not a["return_value"]:
        return places, torch.empty(0, dtype=a["query"].dtype)
    return places, values.to(a["query"].dtype)


def index_grad(a: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and weights, from as many leading places as a query sees keys."""
    query, key, weights, dy = (a[name].double() for name in ("query", "key", "weights", "dy"))
    of_query, of_key, of_weights = (torch.zeros_like(one) for one in (query, key, weights))
    for b in range(query.shape[0]):
        for row in range(query.shape[1]):
            count = min(dy.shape[-1], _seen(a, row))
            places = a["sparse_indices"][b, row, 0, :count].long()
            outer, chosen = dy[b, row, 0, :count], key[b, places, 0]
            products = query[b, row] @ chosen.T
            of_weights[b, row] = products.clamp(min=0) @ outer
            slopes = weights[b, row].unsqueeze(1) * outer * (products > 0)
            of_query[b, row] = slopes @ chosen
            of_key[b, :, 0].index_add_(0, places, slopes.T @ query[b, row])
    dtype = a["query"].dtype
    return of_query.to(dtype), of_key.to(dtype), of_weights.to(a["weights"].dtype)


def _shapes(a: Arguments) -> bool:
    (batch, rows, heads, width), (batches, _, shared, wide) = a["query"].shape, a["key"].shape
    return (
        (batch, width, 1) == (batches, wide, shared)
        and width == _WIDTH
        and tuple(a["weights"].shape) == (batch, rows, heads)
    )


def _contiguous(*names: str) -> Rule:
    return Rule(
        f"{', '.join(names)} are contiguous and have elements",
        lambda a: all(a[name].is_contiguous() and a[name].numel() for name in names),
    )


def _within(a: Arguments) -> bool:
    places, keys = a["sparse_indices"], a["key"].shape[1]
    return all(
        bool(((part := places[:, row, :, : _seen(a, row)]) >= 0).all() and (part < keys).all())
        for row in range(places.shape[1])
    )


_QUERY = of_dtypes("query", 4, "query [B, S1, N, D] float16 or bfloat16", HALF)
_KEY = of_dtypes("key", 4, "key [B, S2, 1, D] float16 or bfloat16", HALF)
_MODE = Rule("sparse_mode is 0 or 3", lambda a: a["sparse_mode"] in (0, 3))
_SHAPES = Rule("one key of width 128 for all heads, weights [B, S1, N]", _shapes)
_UNLIMITED = Rule(
    "pre_tokens and next_tokens are 2**63 - 1", lambda a: a["pre_tokens"] == a["next_tokens"] == _ALL
)
_NO_LENGTHS = Rule(
    "no actual_seq_lengths: sequences have one length here",
    lambda a: a["actual_seq_lengths_query"] is None and a["actual_seq_lengths_key"] is None,
)

INDEX = Kernel(
    "npu::npu_lightning_indexer",
    rules=(
        Rule("layouts are BSND, without block_table: the contract of others is not written",
             lambda a: a["layout_query"] == a["layout_key"] == "BSND" and a["block_table"] is None),
        _NO_LENGTHS,
        _QUERY,
        _KEY,
        one_dtype("query", "key"),
        Rule("weights have the dtype of query or are float32",
             lambda a: a["weights"].dtype in (a["query"].dtype, torch.float32), _BACKWARD),
        Rule("weights have the dtype of query", lambda a: a["weights"].dtype == a["query"].dtype, ("950",)),
        _SHAPES,
        _contiguous("query", "key", "weights"),
        Rule("at most 64 heads", lambda a: a["query"].shape[2] <= 64, _BACKWARD),
        Rule("8, 16, 24, 32 or 64 heads", lambda a: a["query"].shape[2] in _HEADS_OF_950, ("950",)),
        Rule("sparse_count is 1 to 2048, or a multiple of 1024 up to 8192",
             lambda a: 0 < a["sparse_count"] <= 2048
             or (a["sparse_count"] % 1024 == 0 and 0 < a["sparse_count"] <= 8192)),
        _MODE,
        _UNLIMITED,
    ),
    compute=index,
    sources=(
        _ops_transformer("attention/lightning_indexer/op_host/lightning_indexer_tiling.cpp", "16de349b"),
        _ops_transformer("attention/lightning_indexer/docs/aclnnLightningIndexer.md", "0b405513"),
        _ops_transformer("attention/lightning_indexer/op_kernel/lightning_indexer_service_vector.h",
                         "0761bcfd"),
        op_plugin("op_plugin/ops/opapi/LightningIndexerKernelNpuOpApi.cpp"),
    ),
    differs=(
        "the second result is empty unless return_value",
        "places of keys that a query does not see are -1, their scores -inf",
        "which of equal scores comes first is not published",
    ),
    socs=_FORWARD,
)  # fmt: skip
INDEX_GRAD = Kernel(
    "npu::npu_lightning_indexer_grad",
    rules=(
        Rule("layout is BSND: the contract of TND is not written", lambda a: a["layout"] == "BSND"),
        _NO_LENGTHS,
        _QUERY,
        _KEY,
        of_dtypes("sparse_indices", 4, "sparse_indices [B, S1, 1, K] int32", (torch.int32,)),
        one_dtype("query", "key", "weights", "dy"),
        _SHAPES,
        _contiguous("query", "key", "weights", "dy", "sparse_indices"),
        Rule("64 heads", lambda a: a["query"].shape[2] == 64),
        Rule("dy has the shape of sparse_indices, 2048 for each query",
             lambda a: a["dy"].shape == a["sparse_indices"].shape
             and tuple(a["dy"].shape) == (*a["query"].shape[:2], 1, 2048)),
        Rule("at least 2048 keys", lambda a: a["key"].shape[1] >= 2048),
        _MODE,
        Rule("every query sees a key (not checked by the device)",
             lambda a: a["sparse_mode"] == 0 or a["key"].shape[1] >= a["query"].shape[1]),
        _UNLIMITED,
        Rule("the places that a query sees are of keys (not checked by the device)", _within, of_values=True),
    ),
    compute=index_grad,
    sources=(
        _ops_transformer("attention/lightning_indexer_grad/op_host/lightning_indexer_grad_tiling.cpp",
                         "0fb620d7"),
        _ops_transformer("attention/lightning_indexer_grad/op_kernel/lightning_indexer_grad_kernel.h",
                         "004f6242"),
        _ops_transformer("attention/lightning_indexer_grad/docs/aclnnLightningIndexerGrad_en.md", "827a6040"),
        op_plugin("op_plugin/ops/opapi/LightningIndexerGradKernelNpuOpApi.cpp"),
    ),
    differs=("with sparse_mode 3 as many leading places are read as a query sees keys",),
    socs=_BACKWARD,
)  # fmt: skip

KERNELS = (INDEX, INDEX_GRAD)
