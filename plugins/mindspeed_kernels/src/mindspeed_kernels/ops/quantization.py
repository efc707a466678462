"""Scales of quantized operands: packed ones, and weights that are widened before they are multiplied."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_kernels.contract import ContractError


def decoded_scale(scale: Tensor) -> Tensor:
    """Return a scale as float32; int64 and uint64 are packed, with a float32 in their low half."""
    if scale.dtype == torch.uint64:
        scale = scale.view(torch.int64)
    if scale.dtype != torch.int64:
        return scale.float()
    low = scale & 0xFFFFFFFF
    # Into the range of int32 before the bits are read as a float32.
    return torch.where(low >= 1 << 31, low - (1 << 32), low).to(torch.int32).view(torch.float32)


def packed_scale(scale: Tensor) -> Tensor:
    """Return the inverse of `decoded_scale`: float32 as int64 with the bits in the low half."""
    return scale.float().contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def exact_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x · weight + bias`` of integers, exact, as float64.

    Products of 8-bit numbers summed over fewer than 2**37 terms are exact in float64, whose kernels are fast
    on every device.
    """
    result = x.double() @ weight.double()
    return result if bias is None else result + bias.double()


def widened_weight(
    weight: Tensor, scale: Tensor, offset: Tensor | None, group_size: int, dtype: torch.dtype
) -> Tensor:
    """Compute ``(weight + offset) * scale`` of an 8-bit weight.

    Args:
        weight: ``[..., k, n]`` integers.
        scale: one number, ``[..., n]``, or ``[..., ceil(k / group_size), n]``.
        offset: like ``scale``, or None.
        group_size: rows that share a scale; 0 without groups.
        dtype: of the result.
    """
    rows, wide = weight.shape[-2], torch.promote_types(dtype, torch.float32)

    def spread(table: Tensor) -> Tensor:
        if group_size:
            return table.to(wide).repeat_interleave(group_size, dim=-2)[..., :rows, :]
        if table.dim() == weight.dim() - 1 and table.numel() > 1:
            return table.to(wide).unsqueeze(-2)
        return table.to(wide)

    values = weight.to(wide)
    if offset is not None:
        values = values + spread(offset)
    return (values * spread(scale)).to(dtype)


def check_group_size(operator: str, group_size: int, rows: int) -> None:
    """Refuse groups of a weight's rows other than a multiple of 32, and fewer than all.

    Raises:
        ContractError: they have not.
    """
    if group_size and (group_size % 32 or not 32 <= group_size < rows):
        raise ContractError(
            f"{operator}: antiquant_group_size must be a multiple of 32 in 32 to {rows - 1}, got "
            f"{group_size}; nearest supported: 32"
        )
