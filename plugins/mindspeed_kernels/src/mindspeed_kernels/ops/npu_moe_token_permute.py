"""Sorting tokens by expert: ``npu_moe_token_permute``, the counterpart of `npu_moe_token_unpermute`.

The permutation is stable, so that equal inputs give equal bits. Backward adds up the ``k`` copies of each
token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_kernels.contract import NPU_FLOATING, Choice, Dtype, Rank
from mindspeed_kernels.ops.availability import kernel_of_training_devices
from mindspeed_kernels.ops.operator import Make, Operator, Sample

_INDICES = (torch.int64, torch.int32)


def npu_moe_token_permute_reference(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """Copy each token once for every expert it goes to, sorted by expert.

    Args:
        tokens: ``[T, h]``, floating.
        indices: ``[T, k]`` or ``[T]`` integers, the experts of each token; with ``padded_mode``
            ``[E, capacity]``, the tokens of each expert.
        num_out_tokens: rows to keep; None or 0 keep all, a negative number drops as many from the end.
        padded_mode: ``indices`` name tokens by expert.

    Returns:
        ``[num_out, h]`` and where each copy went: int32 ``[T * k]``, the copy ``j`` of token ``t`` is row
        ``result[t * k + j]`` (with ``padded_mode`` the indices themselves).
    """
    if padded_mode:
        return tokens.index_select(0, indices.reshape(-1)), indices
    order = torch.argsort(indices.reshape(-1), stable=True)
    where = torch.empty_like(order)
    where[order] = torch.arange(order.numel(), device=order.device)
    copies = 1 if indices.dim() == 1 else indices.shape[1]
    kept = order[: kept_rows(order.numel(), num_out_tokens)]
    return tokens.index_select(0, kept // copies), where.to(torch.int32)


def kept_rows(copies: int, num_out_tokens: int | None) -> int:
    """Return how many of the sorted copies are kept."""
    if not num_out_tokens:
        return copies
    return min(num_out_tokens, copies) if num_out_tokens > 0 else max(0, copies + num_out_tokens)


def _samples(make: Make) -> list[Sample]:
    indices = torch.tensor([[0, 4], [4, 3], [4, 2], [1, 1]], device=make(1).device)
    return [
        Sample((make(4, 6), indices)),
        Sample((make(4, 6), indices, 5)),
        Sample((make(4, 6), indices[:, 0].contiguous())),
    ]


npu_moe_token_permute = Operator(
    "npu_moe_token_permute",
    npu_moe_token_permute_reference,
    contract=(Rank("tokens", 2, 2), Rank("indices", 1, 2), Dtype("tokens"), Dtype("indices", _INDICES)),
    saved="the indices",
    samples=_samples,
)


@npu_moe_token_permute.backend(
    "npu",
    ("npu",),
    available=kernel_of_training_devices,
    contract=(Dtype("tokens", NPU_FLOATING), Choice("padded_mode", (False,))),
)
def _npu(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    if not tokens.numel() or not indices.numel():  # The kernel takes no empty tensor.
        return npu_moe_token_permute_reference(tokens, indices, num_out_tokens)
    import torch_npu

    kept = kept_rows(indices.numel(), num_out_tokens)
    result: tuple[Tensor, Tensor] = torch_npu.npu_moe_token_permute(tokens, indices, kept, padded_mode)
    return result
