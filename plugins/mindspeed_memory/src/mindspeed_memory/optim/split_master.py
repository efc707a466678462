"""A float32 number as a bfloat16 number and 16 further bits.

The bfloat16 number is the weight that the model computes with, and the 16 bits are the lower half of the
float32 number. Under round-half-to-even, which is how torch casts, one case in 2^17 needs a bit more: a
number exactly between two bfloat16 numbers that was rounded up. Which elements these are is returned beside
it. Under round-half-up nothing more is needed, but the weights are not those of a cast.

All arithmetic is on integers, in place of the halves of a float32 number (little-endian).
"""

from __future__ import annotations

import torch

RNE, HALF_UP = "rne", "half-up"
"""Roundings: to the nearest, ties to even, as a cast does; to the nearest, ties away from zero."""
_HALF = -(2**15)
"""0x8000 as a signed number of 16 bits: the lower half of a number in the middle between two weights."""


def split(
    main: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, rounding: str
) -> torch.Tensor | None:
    """Split float32 numbers into weights and residuals.

    Args:
        main: ``[n]`` float32, contiguous.
        weight: ``[n]`` bfloat16, is overwritten.
        residual: ``[n]`` int16, is overwritten.
        rounding: `RNE` or `HALF_UP`.

    Returns:
        ``[n]`` bool: ties that were rounded up, which `join` needs; None where there is no need.
    """
    if rounding == HALF_UP:
        # A sum would turn some NaNs into numbers.
        number = torch.where(main.isnan(), torch.nan, main).view(torch.int32).add_(2**15)
        low, high = _halves(number)
        weight.view(torch.int16).copy_(high)
        residual.copy_(low)
        return None
    low, high = _halves(main)
    weight.copy_(main)
    residual.copy_(low)
    return (low == _HALF).logical_and_(weight.view(torch.int16) != high)


def join(
    weight: torch.Tensor, residual: torch.Tensor, rounding: str, ties: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the float32 numbers that `split` split; where one was a NaN, a NaN.

    Args:
        weight: ``[n]`` bfloat16, as `split` left it.
        residual: ``[n]`` int16, as `split` left it.
        rounding: that of the split.
        ties: of elements that are ties rounded up, their mask or their indices; None for none.
    """
    main = torch.empty(weight.numel(), dtype=torch.float32, device=weight.device)
    low, high = _halves(main)
    low.copy_(residual)
    if rounding == HALF_UP:
        high.copy_(weight.view(torch.int16))
        main.view(torch.int32).sub_(2**15)
        return main
    up = (residual < 0).logical_and_(residual != _HALF)
    torch.sub(weight.view(torch.int16), up.view(torch.int8), out=high)
    if ties is not None and ties.dtype == torch.bool:
        high.sub_(ties.view(torch.int8))
    elif ties is not None and ties.numel():
        high.index_add_(0, ties, high.new_full(ties.shape, -1))
    return main


def unsplit(residual: torch.Tensor, rounding: str) -> None:
    """Set residuals so that the float32 numbers are those of the weights."""
    residual.fill_(_HALF if rounding == HALF_UP else 0)


def _halves(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = numbers.view(torch.int16).view(-1, 2).unbind(1)
    return low, high
