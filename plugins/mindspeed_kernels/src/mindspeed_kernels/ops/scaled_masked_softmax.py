"""Softmax of scaled scores with hidden positions, which keeps its result only.

The composition of torch operations keeps a float32 copy besides. Rows of which everything is hidden are zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_kernels.contract import NPU_FLOATING, ContractError, Divisible, Dtype, Rank, Size
from mindspeed_kernels.ops.availability import torch_npu_missing
from mindspeed_kernels.ops.operator import Make, Operator, Sample
from mindspeed_megatron.planned_kernels import kernels_for

_CACHED_ELEMENTS = 1 << 17
"""Elements of the scores that a CPU works on at a time."""


def scaled_masked_softmax_reference(
    x: Tensor, mask: Tensor | None = None, scale: float = 1.0, fixed_triu_mask: bool = False
) -> Tensor:
    """Compute ``softmax(scale * x)`` over the last dimension, where ``mask`` does not hide.

    Args:
        x: scores ``[b, n, sq, sk]``, floating.
        mask: ``[b | 1, n | 1, sq, sk]`` bool, True hides; None hides nothing.
        scale: factor of the scores.
        fixed_triu_mask: hide the strict upper triangle instead; ``mask`` must be None.

    Returns:
        ``[b, n, sq, sk]`` in the dtype of ``x``.

    Raises:
        ContractError: both masks, or a triangle of scores that are not square.
    """
    hidden = _hidden(x, mask, fixed_triu_mask)
    wide = torch.promote_types(x.dtype, torch.float32)
    scores = x.to(wide) * scale
    if hidden is None:
        return torch.softmax(scores, dim=-1).to(x.dtype)
    scores = scores.masked_fill(hidden, float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    return weights.masked_fill(hidden.all(-1, keepdim=True), 0.0).to(x.dtype)


def _hidden(x: Tensor, mask: Tensor | None, triangle: bool) -> Tensor | None:
    if not triangle:
        return None if mask is None else mask.bool()
    if mask is not None:
        raise ContractError(
            "scaled_masked_softmax[any]: mask must be None with fixed_triu_mask, got a tensor; nearest "
            "supported: fixed_triu_mask=False"
        )
    sq, sk = x.shape[-2:]
    if sq != sk:
        raise ContractError(
            f"scaled_masked_softmax[any]: x must be square with fixed_triu_mask, got {sq} x {sk}; nearest "
            "supported: a mask"
        )
    return torch.ones(sq, sk, dtype=torch.bool, device=x.device).triu_(1)[None, None]


class ScaledMaskedSoftmax(torch.autograd.Function):
    """Keeps the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, hidden: Tensor | None, scale: float, empty_rows: bool = True) -> Tensor:
        """Compute the softmax; see `scaled_masked_softmax_reference`.

        Args:
            ctx: of autograd.
            x: ``[b, n, sq, sk]``.
            hidden: ``[b | 1, n | 1, sq, sk]`` bool, True hides, or None.
            scale: factor of the scores.
            empty_rows: everything may be hidden from a row.
        """
        if not _blockwise(x):
            result = _weights(x, hidden, scale, empty_rows)
        else:
            result = torch.empty_like(x, memory_format=torch.contiguous_format)
            for block in _blocks(x):
                mask = None if hidden is None else hidden[_of_mask(block, hidden)]
                result[block] = _weights(x[block], mask, scale, empty_rows)
        ctx.save_for_backward(result)
        ctx.scale = scale
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Compute ``scale * y * (g - sum(g * y))``."""
        (result,) = ctx.saved_tensors
        if not _blockwise(result):
            return _to_scores(gradients[0], result, ctx.scale), None, None, None
        to_scores = torch.empty_like(result)
        for block in _blocks(result):
            to_scores[block] = _to_scores(gradients[0][block], result[block], ctx.scale)
        return to_scores, None, None, None


def _weights(x: Tensor, hidden: Tensor | None, scale: float, empty_rows: bool) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    scores = x.to(wide) * scale
    if hidden is None:
        return torch.softmax(scores, dim=-1).to(x.dtype)
    scores.masked_fill_(hidden, torch.finfo(wide).min)
    weights = torch.softmax(scores, dim=-1)
    if empty_rows:
        # The smallest number instead of -inf makes rows without anything uniform instead of NaN.
        weights = weights.masked_fill_(hidden.all(-1, keepdim=True), 0.0)
    return weights.to(x.dtype)


def _to_scores(gradient: Tensor, result: Tensor, scale: float) -> Tensor:
    wide = torch.promote_types(result.dtype, torch.float32)
    weights = result.to(wide)
    shares = gradient.to(wide) * weights
    shared = shares.sum(-1, keepdim=True)
    return shares.addcmul_(weights, shared, value=-1).mul_(scale).to(result.dtype)


def _blockwise(x: Tensor) -> bool:
    # A compiler fuses the whole computation itself.
    large = x.numel() > _CACHED_ELEMENTS
    return kernels_for(x.device.type) == "cpu" and large and not torch.compiler.is_compiling()


def _blocks(x: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """Return rows of one sample and head, so few that intermediate results stay in a CPU's cache."""
    step = max(1, _CACHED_ELEMENTS // max(1, x.shape[3]))
    for sample, head, row in product(range(x.shape[0]), range(x.shape[1]), range(0, x.shape[2], step)):
        yield slice(sample, sample + 1), slice(head, head + 1), slice(row, row + step)


def _of_mask(block: tuple[slice, slice, slice], hidden: Tensor) -> tuple[slice, slice, slice]:
    """Return the part of a mask that belongs to a block; samples and heads may share one."""
    sample, head, rows = block
    return (
        sample if hidden.shape[0] > 1 else slice(0, 1),
        head if hidden.shape[1] > 1 else slice(0, 1),
        rows,
    )


def _key(
    x: Tensor, mask: Tensor | None = None, scale: float = 1.0, fixed_triu_mask: bool = False
) -> tuple[Any, ...]:
    # The kernel of NPUs computes some sizes only.
    given = None if mask is None else (mask.dtype, mask.ndim)
    return x.device, x.dtype, x.ndim, tuple(x.shape[-2:]), given, fixed_triu_mask


def _samples(make: Make) -> list[Sample]:
    x = make(1, 2, 3, 5)
    mask = torch.zeros(1, 1, 3, 5, dtype=torch.bool, device=x.device)
    mask[..., 1, :] = True
    mask[..., 2, 2:] = True
    square = make(1, 2, 32, 32)
    empty_row = torch.zeros(1, 1, 32, 32, dtype=torch.bool, device=x.device)
    empty_row[..., 3, :] = True
    return [
        Sample((x,), {"scale": 0.5}),
        Sample((x, mask, 2.0)),
        Sample((square,), {"fixed_triu_mask": True}),
        Sample((square, empty_row)),
    ]


scaled_masked_softmax = Operator(
    "scaled_masked_softmax",
    scaled_masked_softmax_reference,
    contract=(Dtype("x"), Rank("x", 4, 4), Dtype("mask", (torch.bool, torch.uint8)), Rank("mask", 4, 4)),
    key=_key,
    saved="the result",
    samples=_samples,
)


@scaled_masked_softmax.backend("fused", ("cpu", "cuda"))
def _fused(
    x: Tensor, mask: Tensor | None = None, scale: float = 1.0, fixed_triu_mask: bool = False
) -> Tensor:
    hidden = _hidden(x, mask, fixed_triu_mask)
    result: Tensor = ScaledMaskedSoftmax.apply(x, hidden, scale, not fixed_triu_mask)
    return result


@scaled_masked_softmax.backend(
    "npu",
    ("npu",),
    available=torch_npu_missing,
    contract=(
        Dtype("x", NPU_FLOATING),
        *(Size("x", dimension, 32, 4096) for dimension in (-1, -2)),
        *(Divisible("x", dimension, 32) for dimension in (-1, -2)),
    ),
)
def _npu(x: Tensor, mask: Tensor | None = None, scale: float = 1.0, fixed_triu_mask: bool = False) -> Tensor:
    import torch_npu

    hidden = _hidden(x, mask, fixed_triu_mask)
    if hidden is None:
        hidden = torch.zeros(1, 1, *x.shape[-2:], dtype=torch.bool, device=x.device)
    # The kernel takes no other triangle than the mask.
    result: Tensor = torch_npu.npu_scaled_masked_softmax(x, hidden, scale, False)
    if mask is None:
        return result
    # It gives a row that is masked as a whole equal weights.
    return result.masked_fill(hidden.all(-1, keepdim=True), 0.0)
