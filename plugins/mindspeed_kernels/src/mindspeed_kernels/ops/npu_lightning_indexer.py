"""The indexer of sparse attention: which keys score highest for each query, ``npu_lightning_indexer``.

Heads of the indexer share one key. A key's score for a query is the weighted sum over the heads of their
products, negative products counted as zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_kernels.call import Call
from mindspeed_kernels.contract import (
    Choice,
    ContractError,
    Dtype,
    Holds,
    NotEmpty,
    Range,
    Rank,
    SameDtype,
    SameSize,
    Size,
)
from mindspeed_kernels.ops.availability import ascend_generation, kernel_of
from mindspeed_kernels.ops.operator import Make, Operator, Sample
from mindspeed_kernels.ops.signatures import with_signature_of

NAME = "npu_lightning_indexer"
EVERY_TOKEN = 2**63 - 1
"""A window that hides nothing, the only one there is."""
WIDTH = 128
"""The width of a head that the kernels compute."""
_HEADS, _HEADS_OF_950 = 64, (8, 16, 24, 32, 64)
_COUNT_OF_BACKWARD = 2048
HALF = (torch.float16, torch.bfloat16)


def npu_lightning_indexer_reference(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    layout: str = "BSND",
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    pre_tokens: int = EVERY_TOKEN,
    next_tokens: int = EVERY_TOKEN,
    cmp_ratio: int = 1,
) -> tuple[Tensor, Tensor]:
    """Choose the keys with the highest scores for each query.

    Args:
        query: ``[b, s1, n, d]``, floating.
        key: ``[b, s2, 1, d]``, one for all heads.
        weights: ``[b, s1, n]``, of each head of each query.
        layout: ``"BSND"``.
        cu_seq_lens_q: None.
        cu_seq_lens_k: None.
        sparse_count: how many keys each query gets.
        sparse_mode: 0, every query sees every key; 3, query ``i`` sees the first ``s2 - s1 + i + 1`` keys.
        pre_tokens: ``2**63 - 1``.
        next_tokens: ``2**63 - 1``.
        cmp_ratio: 1.

    Raises:
        ContractError: a number is none of these.

    Returns:
        The places of the keys, int32 ``[b, s1, 1, sparse_count]``, the highest score first, -1 where a query
        sees no further key; and their scores in the dtype of ``query``, ``-inf`` there. Scores are
        differentiable. Which of equal scores comes first is up to the backend.
    """
    check_numbers(sparse_count, sparse_mode, (pre_tokens, next_tokens), cmp_ratio)
    scores = index_scores(query, key, weights)
    rows, keys = scores.shape[1:]
    seen = torch.ones(rows, keys, dtype=torch.bool, device=query.device)
    if sparse_mode == 3:
        seen = seen.tril(keys - rows)
    lowest = float("-inf")
    ranked = scores.detach().masked_fill(~seen, lowest).argsort(dim=-1, descending=True, stable=True)
    ranked = ranked[..., :sparse_count]
    found = seen.expand(scores.shape).gather(-1, ranked)
    places = ranked.masked_fill(~found, -1).to(torch.int32)
    values = entries_at(scores, ranked).masked_fill(~found, lowest).to(query.dtype)
    missing = (0, sparse_count - ranked.shape[-1])
    places = torch.nn.functional.pad(places, missing, value=-1)
    return places.unsqueeze(2), torch.nn.functional.pad(values, missing, value=lowest).unsqueeze(2)


def entries_at(scores: Tensor, places: Tensor) -> Tensor:
    """Return the entries ``[b, s1, k]`` of scores; `torch.gather` has another backward on each device."""
    count = scores.shape[0] * scores.shape[1]
    starts = torch.arange(count, device=scores.device).view(*scores.shape[:2], 1) * scores.shape[2]
    return scores.reshape(-1).index_select(0, (starts + places).reshape(-1)).view(places.shape)


def check_numbers(count: int, mode: int, window: tuple[int, int], ratio: int) -> None:
    """Check on every call what only the first one of a kind is judged by.

    Raises:
        ContractError: a number is not computed.
    """
    if count < 1 or mode not in (0, 3) or window != (EVERY_TOKEN, EVERY_TOKEN) or ratio != 1:
        raise ContractError(
            f"{NAME}: takes sparse_count of at least 1, sparse_mode 0 or 3, pre_tokens and next_tokens of "
            f"2**63 - 1 and cmp_ratio 1, got {count}, {mode}, {window} and {ratio}"
        )


def index_scores(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """Return the scores ``[b, s1, s2]``, in float32 at least."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    products = torch.einsum("bsnd,btd->bsnt", query.to(dtype), key.squeeze(2).to(dtype)).relu()
    return torch.einsum("bsn,bsnt->bst", weights.to(dtype), products)


def _samples(make: Make) -> list[Sample]:
    query, key, weights = make(2, 3, 8, WIDTH), make(2, 5, 1, WIDTH), make(2, 3, 8)
    return [
        Sample((query, key, weights), {"sparse_count": 4}),
        Sample((query, key, weights), {"sparse_count": 2, "sparse_mode": 0}),
        Sample((query, key, weights), {"sparse_count": 7}),
        Sample((query, key[:, :2], weights), {"sparse_count": 2}),
    ]


def _comparable(result: tuple[Tensor, Tensor]) -> Tensor:
    """Leave out the places, which two computations may exchange where scores are almost equal."""
    return result[1]


def _no_lengths(name: str) -> Holds:
    def judge(call: Call) -> tuple[Any, Any] | None:
        return (call[name], "None") if call.given(name) else None

    return Holds(name, "must not be given: sequences of one length are indexed", judge)


npu_lightning_indexer = Operator(
    NAME,
    npu_lightning_indexer_reference,
    contract=(
        Rank("query", 4, 4),
        Rank("key", 4, 4),
        Rank("weights", 3, 3),
        Dtype("query"),
        Dtype("key"),
        Dtype("weights"),
        Size("key", 2, 1, 1),
        SameSize("key", 0, "query", 0),
        SameSize("key", 3, "query", 3),
        SameSize("weights", 0, "query", 0),
        SameSize("weights", 1, "query", 1),
        SameSize("weights", 2, "query", 2),
        Choice("layout", ("BSND",)),
        _no_lengths("cu_seq_lens_q"),
        _no_lengths("cu_seq_lens_k"),
        Range("sparse_count", 1, EVERY_TOKEN),
        Choice("sparse_mode", (0, 3)),
        Choice("pre_tokens", (EVERY_TOKEN,)),
        Choice("next_tokens", (EVERY_TOKEN,)),
        Choice("cmp_ratio", (1,)),
    ),
    saved="query, key, weights and the places",
    samples=_samples,
    comparable=_comparable,
)


def _returned(count: int) -> bool:
    return count <= 2048 or (count <= 8192 and count % 1024 == 0)


def _heads() -> tuple[int, ...]:
    """Return the numbers of heads that the kernel of these devices indexes."""
    return _HEADS_OF_950 if ascend_generation() == "950" else tuple(range(1, _HEADS + 1))


def _count_beyond_kernel(call: Call) -> tuple[int, str] | None:
    count = call["sparse_count"]
    if not isinstance(count, int) or _returned(count):
        return None
    return count, "1 to 2048, or a multiple of 1024 up to 8192"


def _heads_beyond_kernel(call: Call) -> tuple[int, int] | None:
    shape = call["query"].shape
    return None if shape is None or shape[2] in _heads() else (shape[2], _heads()[-1])


def kernel_differentiates(query: Tensor, key: Tensor, places: Tensor, sparse_mode: int) -> bool:
    """Tell whether the kernel computes the gradients; its published limits are narrower than forward's."""
    rows, keys = query.shape[1], key.shape[1]
    return (
        ascend_generation() != "950"
        and query.shape[2] == _HEADS
        and places.shape[-1] == _COUNT_OF_BACKWARD
        and keys >= _COUNT_OF_BACKWARD
        # The kernel leaves gradients of queries that see no key unwritten.
        and (sparse_mode == 0 or keys >= rows)
    )


class IndexOnNpu(torch.autograd.Function):
    """The kernel; scores are differentiated by a second one where its limits allow."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, weights: Tensor, count: int, sparse_mode: int
    ) -> tuple[Tensor, Tensor]:
        """Compute places and scores."""
        import torch_npu

        places, values = torch_npu.npu_lightning_indexer(
            query, key, weights, sparse_count=count, sparse_mode=sparse_mode, return_value=True
        )
        ctx.save_for_backward(query, key, weights, places)
        ctx.sparse_mode = sparse_mode
        ctx.mark_non_differentiable(places)
        return places, values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Return the gradients of query, key and weights."""
        import torch_npu

        query, key, weights, places = ctx.saved_tensors
        if kernel_differentiates(query, key, places, ctx.sparse_mode):
            of_each = torch_npu.npu_lightning_indexer_grad(
                query, key, gradient.contiguous(), places, weights, layout="BSND", sparse_mode=ctx.sparse_mode
            )
        else:
            with torch.enable_grad():
                leaves = [one.detach().requires_grad_() for one in (query, key, weights)]
                scores = index_scores(*leaves)
            found = places.squeeze(2) >= 0
            chosen = places.squeeze(2).long().clamp(min=0)
            outer = gradient.squeeze(2).to(scores.dtype).masked_fill(~found, 0.0)
            outer = torch.zeros_like(scores).scatter_add(-1, chosen, outer)
            of_each = torch.autograd.grad(scores, leaves, outer)
        return (*of_each, None, None)


@npu_lightning_indexer.backend(
    "npu",
    ("npu",),
    available=kernel_of(
        "910B", "910_93", "950", calls=("npu_lightning_indexer", "npu_lightning_indexer_grad")
    ),
    contract=(
        NotEmpty("query"),
        NotEmpty("key"),
        Dtype("query", HALF),
        SameDtype(("query", "key", "weights")),
        Size("query", 3, WIDTH, WIDTH),
        Holds("query", "has a number of heads that the kernel does not index", _heads_beyond_kernel),
        Holds("sparse_count", "is no number of keys that the kernel returns", _count_beyond_kernel),
    ),
)
@with_signature_of(npu_lightning_indexer_reference)
def _npu(**given: Any) -> tuple[Tensor, Tensor]:
    count, mode = given["sparse_count"], given["sparse_mode"]
    check_numbers(count, mode, (given["pre_tokens"], given["next_tokens"]), given["cmp_ratio"])
    query, key = given["query"], given["key"]
    served = query.shape[3] == WIDTH and query.shape[2] in _heads() and _returned(count)
    if not (served and query.numel() and key.numel()):
        # Sizes differ between calls of one kind, of which only the first was judged by the contract.
        return npu_lightning_indexer_reference(**given)
    operands = (query.contiguous(), key.contiguous(), given["weights"].contiguous())
    result: tuple[Tensor, Tensor] = IndexOnNpu.apply(*operands, count, mode)
    return result
