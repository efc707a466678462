"""Bringing experts' results back, with the routing map: ``npu_moe_token_unpermute_with_routing_map``.

The counterpart of `npu_moe_token_permute_with_routing_map`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed_kernels.contract import NPU_FLOATING, ContractError, Dtype, Rank, SameDtype, SameShape
from mindspeed_kernels.ops.npu_moe_token_permute_with_routing_map import (
    MAPS,
    MOST_COPIES,
    maps_missing,
    npu_moe_token_permute_with_routing_map,
)
from mindspeed_kernels.ops.npu_moe_token_unpermute import (
    npu_moe_token_unpermute,
    npu_moe_token_unpermute_reference,
)
from mindspeed_kernels.ops.operator import Make, Operator, Sample
from mindspeed_kernels.ops.routing_maps import (
    by_expert,
    by_token,
    check_rows,
    experts_of,
    sample_map,
    with_equal_rows,
)
from mindspeed_kernels.ops.signatures import with_signature_of

NAME = "npu_moe_token_unpermute_with_routing_map"


def npu_moe_token_unpermute_with_routing_map_reference(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: Sequence[int],
    *,
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    drop_and_pad: bool = False,
) -> Tensor:
    """Compute the sum of the rows of each token, each times its probability.

    Args:
        permuted_tokens: ``[T * k, h]``, or ``[E * capacity, h]`` with ``drop_and_pad``; floating.
        sorted_indices: int32, from `npu_moe_token_permute_with_routing_map`.
        restore_shape: ``(T, h)``.
        probs: ``[T, E]``, floating; None counts every row once.
        routing_map: ``[T, E]`` bool or int8; ``probs`` need it unless ``drop_and_pad``.
        drop_and_pad: rows are grouped by expert, ``capacity`` each.

    Returns:
        ``[T, h]`` in the dtype of ``permuted_tokens``.

    Raises:
        ContractError: the sizes do not fit, rows of the map differ, or there is none for ``probs``.
    """
    copies = _rows_of_each(permuted_tokens, sorted_indices, restore_shape, probs, routing_map, drop_and_pad)
    if not drop_and_pad:
        weights = _weights(probs, routing_map, sorted_indices, restore_shape[0], copies)
        return npu_moe_token_unpermute_reference(permuted_tokens, sorted_indices, weights)
    wide = torch.promote_types(permuted_tokens.dtype, torch.float32)
    chosen, rows = sorted_indices.long(), permuted_tokens.to(wide)
    if probs is not None:
        rows = rows * by_expert(probs.to(wide), chosen.view(probs.shape[1], copies)).unsqueeze(1)
    return rows.new_zeros(tuple(restore_shape)).index_add(0, chosen, rows).to(permuted_tokens.dtype)


def _rows_of_each(
    permuted: Tensor,
    where: Tensor,
    restore_shape: Sequence[int],
    probs: Tensor | None,
    routing_map: Tensor | None,
    drop_and_pad: bool,
) -> int:
    """Return the rows of each token, or of each expert, after checking sizes."""
    tokens, width = restore_shape
    if where.numel() != permuted.shape[0] or width != permuted.shape[1]:
        raise ContractError(
            f"{NAME}: sorted_indices {list(where.shape)} and restore_shape {list(restore_shape)} must be "
            f"those of permuted_tokens {list(permuted.shape)}"
        )
    table = probs if routing_map is None else routing_map
    if table is not None and table.shape[0] != tokens:
        raise ContractError(
            f"{NAME}: restore_shape has {tokens} tokens, probs or routing_map {table.shape[0]}"
        )
    if drop_and_pad:
        parts, name = (1 if table is None else table.shape[1]), "experts"
    else:
        parts, name = tokens, "tokens"
        if probs is not None and routing_map is None:
            raise ContractError(f"{NAME}: probs need routing_map unless drop_and_pad")
    if where.numel() % max(1, parts):
        raise ContractError(f"{NAME}: {where.numel()} rows are not as many for each of {parts} {name}")
    return where.numel() // max(1, parts)


def _weights(
    probs: Tensor | None, routing_map: Tensor | None, where: Tensor, tokens: int, copies: int
) -> Tensor:
    """Return the probability ``[T, k]`` of each copy, ones where there are none."""
    if probs is None or routing_map is None:
        return torch.ones(tokens, copies, dtype=torch.float32, device=where.device)
    check_rows(NAME, routing_map, copies)
    return by_token(probs, experts_of(routing_map, copies)).view(tokens, copies)


def _samples(make: Make) -> list[Sample]:
    tokens, probs = torch.zeros(4, 1, device=make(1).device), make(4, 5)
    routing_map = sample_map(tokens.device)
    found = []
    for number, padded in ((8, False), (10, True)):
        where = npu_moe_token_permute_with_routing_map(
            tokens, routing_map, num_out_tokens=number, drop_and_pad=padded
        )[2]
        weighed = {"probs": probs, "routing_map": routing_map, "drop_and_pad": padded}
        found += [
            Sample((make(number, 6), where, (4, 6)), {"drop_and_pad": padded}),
            Sample((make(number, 6), where, (4, 6)), weighed),
        ]
    nothing = torch.zeros(0, dtype=torch.int32, device=tokens.device)
    return [*found, Sample((make(0, 6), nothing, (4, 6)))]


npu_moe_token_unpermute_with_routing_map = Operator(
    NAME,
    npu_moe_token_unpermute_with_routing_map_reference,
    contract=(
        Rank("permuted_tokens", 2, 2),
        Rank("sorted_indices", 1, 1),
        Rank("probs", 2, 2),
        Rank("routing_map", 2, 2),
        Dtype("permuted_tokens"),
        Dtype("sorted_indices", (torch.int32,)),
        Dtype("probs"),
        Dtype("routing_map", MAPS),
        SameShape("probs", "routing_map"),
    ),
    saved="the rows, the indices and the probabilities",
    samples=_samples,
)


def _padded(call: Any) -> str:
    return "every expert has the same number of rows" if call["drop_and_pad"] else ""


@npu_moe_token_unpermute_with_routing_map.backend("lean", ("cpu", "cuda"), supports=_padded)
@with_signature_of(npu_moe_token_unpermute_with_routing_map_reference)
def _lean(
    *,
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: Sequence[int],
    probs: Tensor | None,
    routing_map: Tensor | None,
    drop_and_pad: bool,
) -> Tensor:
    copies = _rows_of_each(permuted_tokens, sorted_indices, restore_shape, probs, routing_map, drop_and_pad)
    weights = _weights(probs, routing_map, sorted_indices, restore_shape[0], copies)
    return npu_moe_token_unpermute(permuted_tokens, sorted_indices, weights)


@npu_moe_token_unpermute_with_routing_map.backend(
    "npu",
    ("npu",),
    available=maps_missing,
    contract=(Dtype("permuted_tokens", NPU_FLOATING), SameDtype(("permuted_tokens", "probs"))),
)
@with_signature_of(npu_moe_token_unpermute_with_routing_map_reference)
def _npu(
    *,
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: Sequence[int],
    probs: Tensor | None,
    routing_map: Tensor | None,
    drop_and_pad: bool,
) -> Tensor:
    import torch_npu

    copies = _rows_of_each(permuted_tokens, sorted_indices, restore_shape, probs, routing_map, drop_and_pad)
    if not permuted_tokens.numel():
        # The kernel would leave the result unwritten.
        return permuted_tokens.new_zeros(tuple(restore_shape)) + permuted_tokens.sum()
    if probs is not None and not drop_and_pad and copies > MOST_COPIES:
        return npu_moe_token_unpermute_with_routing_map_reference(
            permuted_tokens, sorted_indices, restore_shape, probs=probs, routing_map=routing_map
        )
    if routing_map is not None:
        routing_map = routing_map.bool()
    if probs is not None and routing_map is not None and not drop_and_pad:
        routing_map, sound = with_equal_rows(routing_map, copies)
        probs = torch.where(sound, probs, float("nan"))
    if probs is not None and routing_map is None:
        # Backward counts the experts in a map, whose entries it does not read.
        routing_map = torch.ones_like(probs, dtype=torch.bool)
    result: Tensor = torch_npu.npu_moe_token_unpermute_with_routing_map(
        permuted_tokens,
        sorted_indices,
        list(restore_shape),
        probs=probs,
        routing_map=routing_map,
        drop_and_pad=drop_and_pad,
    )
    return result
