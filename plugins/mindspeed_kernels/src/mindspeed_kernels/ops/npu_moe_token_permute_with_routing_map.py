"""Sorting tokens by expert, with a map of the experts: ``npu_moe_token_permute_with_routing_map``.

It is `npu_moe_token_permute` with rows of a map for indices, with the probabilities sorted along, and with a
second form, ``drop_and_pad``, in which every expert has a fixed number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_kernels.call import Call
from mindspeed_kernels.contract import NPU_FLOATING, Dtype, Holds, Rank, SameShape, SameSize
from mindspeed_kernels.npu_builds import call_missing
from mindspeed_kernels.ops.availability import ascend_generation, torch_npu_missing
from mindspeed_kernels.ops.npu_moe_token_permute import npu_moe_token_permute_reference
from mindspeed_kernels.ops.operator import Make, Operator, Sample
from mindspeed_kernels.ops.routing_maps import (
    by_expert,
    by_token,
    check_rows,
    copies_per_token,
    experts_of,
    rows_per_expert,
    sample_map,
    tokens_of,
    with_equal_rows,
)
from mindspeed_kernels.ops.signatures import with_signature_of

NAME = "npu_moe_token_permute_with_routing_map"
MAPS = (torch.bool, torch.int8)
"""The dtypes of routing maps."""
MOST_COPIES, _MOST_INDICES = 511, 16777214
"""Experts of a token, and indices, that the kernel sorts."""
Permuted = tuple[Tensor, Tensor | None, Tensor]
"""Rows, their probabilities, and the indices."""


def npu_moe_token_permute_with_routing_map_reference(
    tokens: Tensor,
    routing_map: Tensor,
    *,
    probs: Tensor | None = None,
    num_out_tokens: int | None = None,
    drop_and_pad: bool = False,
) -> Permuted:
    """Copy each token once for every expert it goes to, sorted by expert.

    Args:
        tokens: ``[T, h]``, floating.
        routing_map: ``[T, E]`` bool or int8, True where a token goes to an expert; the same number ``k`` in
            every row, unless ``drop_and_pad``.
        probs: ``[T, E]``, floating.
        num_out_tokens: ``T * k``, counted in the first row by default; with ``drop_and_pad``
            ``E * capacity``. A remainder is dropped.
        drop_and_pad: every expert gets ``capacity`` rows: its first tokens, then others, in their order.

    Returns:
        ``[T * k, h]``; the probabilities ``[T * k]`` of these rows in the dtype of ``probs``, or None; and
        int32 ``[T * k]``, where copy ``j`` of token ``t``, by rising expert, is row ``result[t * k + j]``.
        With ``drop_and_pad`` it is ``[E * capacity]``: the token of each row.

    Raises:
        ContractError: rows of the map differ, or the numbers do not fit.
    """
    routing_map = routing_map.bool()
    if drop_and_pad:
        chosen = tokens_of(routing_map, rows_per_expert(NAME, routing_map, num_out_tokens))
        weights = None if probs is None else by_expert(probs, chosen)
        return tokens.index_select(0, chosen.reshape(-1)), weights, chosen.reshape(-1).to(torch.int32)
    copies = copies_per_token(NAME, routing_map, num_out_tokens)
    check_rows(NAME, routing_map, copies)
    experts = experts_of(routing_map, copies)
    rows, where = npu_moe_token_permute_reference(tokens, experts)
    return rows, None if probs is None else _sorted(by_token(probs, experts), where), where


def _sorted(entries: Tensor, where: Tensor) -> Tensor:
    """Return the entries ``[T * k]`` of copies in the order of the rows."""
    return torch.zeros_like(entries).index_copy(0, where.long(), entries)


def _samples(make: Make) -> list[Sample]:
    tokens, probs = make(4, 6), make(4, 5)
    routing_map = sample_map(tokens.device)
    wide = probs.to(torch.float64 if probs.dtype == torch.float64 else torch.float32)
    padded = {"num_out_tokens": 10, "drop_and_pad": True}
    return [
        Sample((tokens, routing_map), {"num_out_tokens": 8}),
        Sample((tokens, routing_map), {"probs": probs, "num_out_tokens": 9}),
        Sample((tokens, routing_map.to(torch.int8)), {"probs": wide, "num_out_tokens": 8}),
        Sample((tokens, routing_map), padded),
        Sample((tokens, routing_map), {"probs": probs, **padded}),
        Sample((tokens[:0], routing_map[:0]), {"probs": probs[:0], "num_out_tokens": 0}),
    ]


npu_moe_token_permute_with_routing_map = Operator(
    NAME,
    npu_moe_token_permute_with_routing_map_reference,
    contract=(
        Rank("tokens", 2, 2),
        Rank("routing_map", 2, 2),
        Dtype("tokens"),
        Dtype("routing_map", MAPS),
        Dtype("probs"),
        SameSize("routing_map", 0, "tokens", 0),
        SameShape("probs", "routing_map"),
    ),
    saved="the indices",
    samples=_samples,
)


def _number_missing(call: Call) -> tuple[Any, Any] | None:
    return None if call.given("num_out_tokens") else (None, "tokens times experts of each")


def _too_many(call: Call) -> tuple[int, int] | None:
    shape, number = call["routing_map"].shape, call["num_out_tokens"]
    if shape is None or not isinstance(number, int):
        return None
    return _beyond(shape, number, call["drop_and_pad"])


def _beyond(shape: Sequence[int], number: int, drop_and_pad: bool) -> tuple[int, int] | None:
    """Return a size that the kernel does not sort, with the largest that it does."""
    if not drop_and_pad and number // max(1, shape[0]) > MOST_COPIES:
        return number // shape[0], MOST_COPIES
    largest = max(*shape, 0 if drop_and_pad else number)
    return (largest, _MOST_INDICES) if largest > _MOST_INDICES else None


def maps_missing() -> str:
    """Return why the kernels of maps cannot be used; empty when they can."""
    reason = torch_npu_missing()
    if not reason and ascend_generation() in ("310P", "950"):
        return f"there is no such kernel for Ascend {ascend_generation()}"
    # A build has both directions and their gradients, or none.
    return (
        reason
        or call_missing("npu_moe_token_permute_with_routing_map")
        or call_missing("npu_moe_token_permute_with_routing_map_grad")
        or call_missing("npu_moe_token_unpermute_with_routing_map")
    )


class PermuteOnNpu(torch.autograd.Function):
    """The kernel; a map with rows that differ makes a result that is not a number."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, routing_map: Tensor, probs: Tensor | None, number: int, drop_and_pad: bool
    ) -> Permuted:
        """Compute rows, probabilities and indices."""
        import torch_npu

        sound = None
        if not drop_and_pad:
            routing_map, sound = with_equal_rows(routing_map, number // tokens.shape[0])
        rows, weights, where = torch_npu.npu_moe_token_permute_with_routing_map(
            tokens, routing_map, probs=probs, num_out_tokens=number, drop_and_pad=drop_and_pad
        )
        if sound is not None:
            rows[:1] += torch.where(sound, 0.0, float("nan")).to(rows.dtype)
        ctx.save_for_backward(where, routing_map)
        ctx.facts = (drop_and_pad, None if probs is None else weights.dtype)
        ctx.mark_non_differentiable(where)
        return rows, None if probs is None else weights, where

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        """Return the gradients of tokens and probabilities."""
        import torch_npu

        where, routing_map = ctx.saved_tensors
        drop_and_pad, dtype = ctx.facts
        tokens, experts = routing_map.shape
        to_tokens, to_probs = torch_npu.npu_moe_token_permute_with_routing_map_grad(
            gradients[0], gradients[1] if dtype else None, where, routing_map, experts, tokens, drop_and_pad
        )
        return to_tokens, None, to_probs if dtype else None, None, None


@npu_moe_token_permute_with_routing_map.backend(
    "npu",
    ("npu",),
    available=maps_missing,
    contract=(
        Dtype("tokens", NPU_FLOATING),
        Dtype("probs", NPU_FLOATING),
        Holds("num_out_tokens", "must be given", _number_missing),
        Holds("routing_map", "has more tokens or experts of each than the kernel sorts", _too_many),
    ),
)
@with_signature_of(npu_moe_token_permute_with_routing_map_reference)
def _npu(
    *,
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None,
    num_out_tokens: int | None,
    drop_and_pad: bool,
) -> Permuted:
    routing_map = routing_map.bool()
    count = rows_per_expert if drop_and_pad else copies_per_token
    of_each = count(NAME, routing_map, num_out_tokens)
    number = of_each * routing_map.shape[1 if drop_and_pad else 0]
    if not (tokens.numel() and routing_map.numel() and number) or _beyond(
        routing_map.shape, number, drop_and_pad
    ):
        # The kernel would leave the indices unwritten, or sort them wrongly without a word.
        return npu_moe_token_permute_with_routing_map_reference(
            tokens, routing_map, probs=probs, num_out_tokens=num_out_tokens, drop_and_pad=drop_and_pad
        )
    along = probs if probs is not None and probs.dtype == tokens.dtype else None
    permuted: Permuted = PermuteOnNpu.apply(tokens, routing_map, along, number, drop_and_pad)
    rows, weights, where = permuted
    if probs is not None and along is None:
        # The kernel takes probabilities of the tokens' dtype alone; routers compute theirs in float32.
        if drop_and_pad:
            weights = by_expert(probs, where.long().view(routing_map.shape[1], of_each))
        else:
            weights = _sorted(by_token(probs, experts_of(routing_map, of_each)), where)
    return rows, weights, where
