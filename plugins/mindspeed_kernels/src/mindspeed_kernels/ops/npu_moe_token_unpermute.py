"""Bringing the experts' results back to their tokens: ``npu_moe_token_unpermute``, weighted by the router.

The counterpart of `npu_moe_token_permute`. Copies that were dropped there count as zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_kernels.contract import NPU_FLOATING, Choice, ContractError, Dtype, Rank
from mindspeed_kernels.ops.availability import kernel_of_training_devices
from mindspeed_kernels.ops.npu_moe_token_permute import npu_moe_token_permute
from mindspeed_kernels.ops.operator import Make, Operator, Sample
from mindspeed_kernels.ops.signatures import with_signature_of


def npu_moe_token_unpermute_reference(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> Tensor:
    """Sum of the rows of each token, each times its probability.

    Args:
        permuted_tokens: ``[num_out, h]``, floating.
        sorted_indices: int32 ``[T * k]`` from `npu_moe_token_permute`; with ``padded_mode`` the ``[E,
            capacity]`` tokens of each expert.
        probs: ``[T, k]``, floating; None counts every row once (then k is 1). With ``padded_mode``
            ``[E, capacity]``.
        padded_mode: rows are grouped by expert, ``capacity`` each.
        restore_shape: ``(T, h)``; needed with ``padded_mode``.

    Returns:
        ``[T, h]`` in the dtype of ``permuted_tokens``.
    """
    if padded_mode:
        return _from_capacity(permuted_tokens, sorted_indices, probs, restore_shape)
    copies = 1 if probs is None else probs.shape[1]
    rows = _rows(permuted_tokens, sorted_indices)
    if probs is None:
        return rows
    wide = torch.promote_types(permuted_tokens.dtype, torch.float32)
    weighted = rows.to(wide).view(probs.shape[0], copies, rows.shape[1]) * probs.to(wide).unsqueeze(-1)
    return weighted.sum(1).to(permuted_tokens.dtype)


def _rows(permuted: Tensor, where: Tensor) -> Tensor:
    """Return the row of each copy, zeros for copies that were dropped."""
    where = where.reshape(-1).long()
    if permuted.shape[0] >= where.numel():
        return permuted.index_select(0, where)
    kept = where < permuted.shape[0]
    if not permuted.shape[0]:
        return permuted.new_zeros(where.numel(), permuted.shape[1])
    return permuted.index_select(0, torch.where(kept, where, 0)) * kept.unsqueeze(1).to(permuted.dtype)


def _from_capacity(
    permuted: Tensor, indices: Tensor, probs: Tensor | None, restore_shape: Sequence[int] | None
) -> Tensor:
    if probs is None or restore_shape is None:
        raise ContractError(
            "npu_moe_token_unpermute: padded_mode needs probs [E, capacity] and restore_shape (T, h)"
        )
    if probs.shape != indices.shape:
        raise ContractError(
            f"npu_moe_token_unpermute: with padded_mode, probs must be [E, capacity] = {list(indices.shape)} "
            f"like sorted_indices, got {list(probs.shape)}"
        )
    tokens = indices.reshape(-1).long()
    wide = torch.promote_types(permuted.dtype, torch.float32)
    weighted = permuted.to(wide) * probs.to(wide).reshape(-1, 1)
    result = weighted.new_zeros(tuple(restore_shape)).index_add(0, tokens, weighted)
    return result.to(permuted.dtype)


class TokenUnpermuteFunction(torch.autograd.Function):
    """Keeps rows, indices and probabilities, and no product of them."""

    @staticmethod
    def forward(ctx: Any, permuted: Tensor, where: Tensor, probs: Tensor) -> Tensor:
        """Compute the weighted sum ``[T, h]`` of rows ``[num_out, h]``."""
        ctx.save_for_backward(permuted, where, probs)
        tokens, copies = probs.shape
        rows = _rows(permuted, where).view(tokens, copies, permuted.shape[1])
        return torch.bmm(probs.to(rows.dtype).unsqueeze(1), rows).squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        """Return the gradients of rows and probabilities."""
        permuted, where, probs = ctx.saved_tensors
        tokens, copies = probs.shape
        gradient = gradients[0]
        to_permuted = to_probs = None
        if ctx.needs_input_grad[0]:
            spread = (gradient.unsqueeze(1) * probs.to(gradient.dtype).unsqueeze(-1)).flatten(0, 1)
            places = where.reshape(-1).long()
            if permuted.shape[0] < places.numel():
                kept = places < permuted.shape[0]
                spread, places = spread[kept], places[kept]
            to_permuted = torch.zeros_like(permuted).index_copy_(0, places, spread)
        if ctx.needs_input_grad[2]:
            rows = _rows(permuted, where).view(tokens, copies, permuted.shape[1])
            to_probs = torch.bmm(rows, gradient.unsqueeze(-1)).squeeze(-1).to(probs.dtype)
        return to_permuted, None, to_probs


def _samples(make: Make) -> list[Sample]:
    indices = torch.tensor([[0, 4], [4, 3], [4, 2], [1, 1]], device=make(1).device)
    where = npu_moe_token_permute(torch.zeros(4, 1, device=indices.device), indices)[1]
    return [
        Sample((make(8, 6), where, make(4, 2))),
        Sample((make(5, 6), where, make(4, 2))),
        Sample((make(8, 6), where)),
    ]


npu_moe_token_unpermute = Operator(
    "npu_moe_token_unpermute",
    npu_moe_token_unpermute_reference,
    contract=(
        Rank("permuted_tokens", 2, 2),
        Rank("sorted_indices", 1, 2),
        Dtype("permuted_tokens"),
        Dtype("sorted_indices", (torch.int32, torch.int64)),
    ),
    saved="the rows, the indices and the probabilities",
    samples=_samples,
)


@npu_moe_token_unpermute.backend("lean", ("cpu", "cuda"), contract=(Choice("padded_mode", (False,)),))
def _lean(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> Tensor:
    if probs is None:
        return _rows(permuted_tokens, sorted_indices)
    result: Tensor = TokenUnpermuteFunction.apply(permuted_tokens, sorted_indices, probs)
    return result


@npu_moe_token_unpermute.backend(
    "npu",
    ("npu",),
    available=kernel_of_training_devices,
    contract=(Dtype("permuted_tokens", NPU_FLOATING), Choice("padded_mode", (False,))),
)
@with_signature_of(npu_moe_token_unpermute_reference)
def _npu(*, permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor | None, **others: Any) -> Tensor:
    if not permuted_tokens.numel() or not sorted_indices.numel():  # The kernel takes no empty tensor.
        return npu_moe_token_unpermute_reference(permuted_tokens, sorted_indices, probs)
    import torch_npu

    result: Tensor = torch_npu.npu_moe_token_unpermute(permuted_tokens, sorted_indices.int(), probs)
    return result
