"""The loss that trains the indexer of sparse attention, ``npu_sparse_lightning_indexer_grad_kl_loss``.

It is the divergence of the indexer's distribution over the chosen keys from that of attention. The kernel
computes the gradients along with the loss; backward scales them.
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
    Rank,
    SameDtype,
    SameShape,
    SameSize,
    Size,
)
from mindspeed_kernels.ops.availability import kernel_of
from mindspeed_kernels.ops.npu_lightning_indexer import HALF, WIDTH, entries_at, index_scores
from mindspeed_kernels.ops.operator import Make, Operator, Sample
from mindspeed_kernels.ops.signatures import with_signature_of

NAME = "npu_sparse_lightning_indexer_grad_kl_loss"
EVERY_TOKEN = 2**31 - 1
_SMALLEST = 1e-8
"""Floor of probabilities before their logarithm."""
_HEADS, _INDEX_HEADS, _HEAD_WIDTH, _ROPE_WIDTH = (32, 64, 128), (8, 16, 32, 64), 512, 64


def npu_sparse_lightning_indexer_grad_kl_loss_reference(
    query: Tensor,
    key: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    topk_indices: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    scale_value: float = 1,
    *,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_klen: list[int] | None = None,
    layout: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = EVERY_TOKEN,
    next_tokens: int = EVERY_TOKEN,
    cmp_ratio: int = 1,
) -> Tensor:
    """Compute the mean divergence per query; indexer's operands get gradients, those of attention none.

    Args:
        query: ``[s1, b, n, d]`` of attention, floating.
        key: ``[s2, b, d]`` or ``[s2, b, 1, d]``, one for all heads; at least as many as queries.
        query_index: ``[s1, b, m, e]`` of the indexer.
        key_index: ``[s2, b, 1, e]``.
        weights: ``[s1, b, m]``.
        topk_indices: ``[b, s1, k]`` int32, the keys of each query, as `npu_lightning_indexer` returns them:
            -1 where there are no more.
        softmax_max: ``[b, 1, s1, n]``, the highest score of attention over these keys.
        softmax_sum: the sum of its exponentials.
        scale_value: of attention.
        query_rope: ``[s1, b, n, r]``, further width of ``query``.
        key_rope: ``[s2, b, 1, r]``.
        actual_seq_qlen: None.
        actual_seq_klen: None.
        layout: ``"BSND"``, by the name that the kernel has for it.
        sparse_mode: 3.
        pre_tokens: ``2**31 - 1``.
        next_tokens: ``2**31 - 1``.
        cmp_ratio: 1.

    Raises:
        ContractError: a number is none of these, or there are fewer keys than queries.

    Returns:
        A number in float32 at least: the sum over the keys of ``p log(p / q)``, averaged over queries. ``p``
        is the mean over the heads of attention, ``q`` the softmax of the indexer's scores. The gradient of a
        score is ``q - p``.
    """
    check_call(query, key, sparse_mode, (pre_tokens, next_tokens), cmp_ratio)
    rows, batch = query.shape[:2]
    found = topk_indices >= 0
    places = topk_indices.long().clamp(min=0)
    p = entries_at(
        _attention(query, key, query_rope, key_rope, softmax_max, softmax_sum, scale_value), places
    )
    p = p.masked_fill(~found, 0.0)
    operands = (one.transpose(0, 1) for one in (query_index, key_index, weights))
    scores = entries_at(index_scores(*operands), places)
    q = scores.detach().masked_fill(~found, float("-inf")).softmax(-1)
    raised = p.clamp(min=_SMALLEST)
    terms = raised * (raised.log() - q.clamp(min=_SMALLEST).log())
    loss = terms.masked_fill(~found, 0.0).sum()
    # The value is the loss, the gradient what the kernel computes without the lower limit.
    slope = ((q - p) * scores.masked_fill(~found, 0.0)).sum()
    return (loss + (slope - slope.detach())) / (rows * batch)


@torch.no_grad()
def _attention(
    query: Tensor,
    key: Tensor,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    highest: Tensor,
    total: Tensor,
    scale: float,
) -> Tensor:
    """Return the probabilities ``[b, s1, s2]`` of attention, the mean over the heads."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    keys = key.reshape(key.shape[0], key.shape[1], -1)
    products = torch.einsum("sbnd,tbd->bsnt", query.to(dtype), keys.to(dtype))
    if query_rope is not None and key_rope is not None:
        rope = key_rope.reshape(key_rope.shape[0], key_rope.shape[1], -1)
        products = products + torch.einsum("sbnd,tbd->bsnt", query_rope.to(dtype), rope.to(dtype))
    highest, total = (one.squeeze(1).unsqueeze(-1).to(dtype) for one in (highest, total))
    return ((products * scale - highest).exp() / total).mean(2)


def check_call(query: Tensor, key: Tensor, mode: int, window: tuple[int, int], ratio: int) -> None:
    """Check on every call what only the first one of a kind is judged by.

    Raises:
        ContractError: a number is not computed, or a query would see no key.
    """
    if mode != 3 or min(window) < EVERY_TOKEN or ratio != 1 or key.shape[0] < query.shape[0]:
        raise ContractError(
            f"{NAME}: takes sparse_mode 3, pre_tokens and next_tokens of at least 2**31 - 1, cmp_ratio 1 and "
            f"at least as many keys as queries, got {mode}, {window}, {ratio} and {key.shape[0]} keys for "
            f"{query.shape[0]}"
        )


def _samples(make: Make) -> list[Sample]:
    query, key = make(2, 1, 32, _HEAD_WIDTH), make(3, 1, _HEAD_WIDTH)
    index = (make(2, 1, 8, WIDTH), make(3, 1, 1, WIDTH), make(2, 1, 8) / 64)
    places = torch.full((1, 2, 1024), -1, dtype=torch.int32, device=query.device)
    places[0, 0, :2] = torch.tensor([1, 0], dtype=torch.int32)
    places[0, 1, :3] = torch.tensor([2, 0, 1], dtype=torch.int32)
    wide = torch.promote_types(query.dtype, torch.float32)
    highest, total = (torch.full((1, 1, 2, 32), n, dtype=wide, device=query.device) for n in (0.5, 3.0))
    rope = {"query_rope": make(2, 1, 32, _ROPE_WIDTH), "key_rope": make(3, 1, 1, _ROPE_WIDTH)}
    # By name, because not every floating operand gets a gradient.
    names = ("query", "key", "query_index", "key_index", "weights", "topk_indices", "softmax_max")
    given: dict[str, Any] = dict(zip(names, (query, key, *index, places, highest)))
    given |= {"softmax_sum": total, "scale_value": 0.01}
    return [
        Sample((), {**given, **rope}),
        Sample((), {**given, **rope, "key": key.unsqueeze(2)}),
        Sample((), given),
    ]


def _absent(name: str) -> Holds:
    def judge(call: Call) -> tuple[Any, Any] | None:
        return (call[name], "None") if call.given(name) else None

    return Holds(name, "must not be given: sequences have one length", judge)


def _one_rope(call: Call) -> tuple[Any, Any] | None:
    if call.given("query_rope") == call.given("key_rope"):
        return None
    return "one of query_rope and key_rope", "both or none"


npu_sparse_lightning_indexer_grad_kl_loss = Operator(
    NAME,
    npu_sparse_lightning_indexer_grad_kl_loss_reference,
    contract=(
        Rank("query", 4, 4),
        Rank("key", 3, 4),
        Rank("query_index", 4, 4),
        Rank("key_index", 4, 4),
        Rank("weights", 3, 3),
        Rank("topk_indices", 3, 3),
        Rank("softmax_max", 4, 4),
        *(Dtype(name) for name in ("query", "key", "query_index", "key_index", "weights")),
        *(Dtype(name) for name in ("softmax_max", "softmax_sum", "query_rope", "key_rope")),
        Dtype("topk_indices", (torch.int32, torch.int64)),
        Size("key_index", 2, 1, 1),
        SameSize("key", 1, "query", 1),
        SameSize("query_index", 0, "query", 0),
        SameSize("query_index", 1, "query", 1),
        SameSize("key_index", 0, "key", 0),
        SameSize("key_index", 1, "query", 1),
        SameSize("key_index", 3, "query_index", 3),
        SameSize("weights", 0, "query", 0),
        SameSize("weights", 1, "query", 1),
        SameSize("weights", 2, "query_index", 2),
        SameSize("topk_indices", 0, "query", 1),
        SameSize("topk_indices", 1, "query", 0),
        SameSize("softmax_max", 0, "query", 1),
        Size("softmax_max", 1, 1, 1),
        SameSize("softmax_max", 2, "query", 0),
        SameSize("softmax_max", 3, "query", 2),
        SameShape("softmax_sum", "softmax_max"),
        Holds("query_rope", "comes with key_rope", _one_rope),
        _absent("actual_seq_qlen"),
        _absent("actual_seq_klen"),
        Choice("layout", ("BSND",)),
        Choice("sparse_mode", (3,)),
        Choice("cmp_ratio", (1,)),
    ),
    saved="the gradients",
    samples=_samples,
)


class LossOnNpu(torch.autograd.Function):
    """The kernel, which computes loss and gradients at once; operands lie as ``[b, s, n, d]``."""

    @staticmethod
    def forward(ctx: Any, query_index: Tensor, key_index: Tensor, weights: Tensor, *others: Any) -> Tensor:
        """Compute the sum over queries."""
        import torch_npu

        query, key, places, highest, total, scale, query_rope, key_rope = others
        *gradients, loss = torch_npu.npu_sparse_lightning_indexer_grad_kl_loss(
            query,
            key,
            query_index,
            key_index,
            weights,
            places,
            highest,
            total,
            scale,
            query_rope=query_rope,
            key_rope=key_rope,
            layout="BSND",
            sparse_mode=3,
        )
        ctx.save_for_backward(*gradients)
        result: Tensor = loss[0]
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients of the indexer's operands."""
        scaled = [(one * gradient).to(one.dtype) for one in ctx.saved_tensors]
        return (*scaled, *(None for _ in range(8)))


def _served(query: Tensor, index: Tensor, places: Tensor, rope: Tensor | None) -> bool:
    """Tell whether the kernel takes these sizes."""
    return (
        rope is not None
        and rope.shape[-1] == _ROPE_WIDTH
        and query.shape[2] in _HEADS
        and query.shape[3] == _HEAD_WIDTH
        and index.shape[2] in _INDEX_HEADS
        and index.shape[3] == WIDTH
        and places.shape[2] in range(1024, 8193, 1024)
        and query.numel() > 0
    )


@npu_sparse_lightning_indexer_grad_kl_loss.backend(
    "npu",
    ("npu",),
    available=kernel_of("910B", "910_93", calls=("npu_sparse_lightning_indexer_grad_kl_loss",)),
    contract=(
        NotEmpty("query"),
        Dtype("query", HALF),
        SameDtype(("query", "key", "query_index", "key_index", "weights", "query_rope", "key_rope")),
        Dtype("softmax_max", (torch.float32,)),
        Dtype("softmax_sum", (torch.float32,)),
    ),
)
@with_signature_of(npu_sparse_lightning_indexer_grad_kl_loss_reference)
def _npu(**given: Any) -> Tensor:
    query, key, rope = given["query"], given["key"], given["query_rope"]
    check_call(
        query, key, given["sparse_mode"], (given["pre_tokens"], given["next_tokens"]), given["cmp_ratio"]
    )
    if not _served(query, given["query_index"], given["topk_indices"], rope):
        return npu_sparse_lightning_indexer_grad_kl_loss_reference(**given)

    def turned(one: Tensor | None) -> Tensor | None:
        return None if one is None else one.transpose(0, 1).contiguous()

    key = key.unsqueeze(2) if key.dim() == 3 else key
    loss: Tensor = LossOnNpu.apply(
        *(turned(given[name]) for name in ("query_index", "key_index", "weights")),
        turned(query.detach()),
        turned(key.detach()),
        given["topk_indices"].to(torch.int32).unsqueeze(2).contiguous(),
        *(given[name].detach().contiguous() for name in ("softmax_max", "softmax_sum")),
        float(given["scale_value"]),
        turned(rope),
        turned(given["key_rope"]),
    )
    return loss / (query.shape[0] * query.shape[1])
