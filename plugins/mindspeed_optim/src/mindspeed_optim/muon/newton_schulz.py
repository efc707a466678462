"""The Newton-Schulz iteration, which brings all singular values of a matrix near one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_optim.muon.options import Coefficients

_EPSILON = 1e-7


def newton_schulz(
    matrix: torch.Tensor,
    coefficients: Coefficients,
    *,
    precision: str = "high",
    group: Any = None,
    cut: int | None = None,
) -> torch.Tensor:
    """Orthogonalize a matrix: of ``U S V^T`` something like ``U V^T``.

    Args:
        matrix: ``[r, c]``, float32; zeros stay zeros.
        coefficients: of each step, ``X -> a X + (b A + c A A) X`` with ``A = X X^T``.
        precision: of the products. ``low`` and ``medium`` multiply bfloat16 numbers and sum in float32,
            ``high`` float32 numbers, in TF32 where the device has it.
        group: ranks that share the matrix, each with a part of it; None for one that is whole here.
        cut: the dimension of those parts. Products run over it, whatever the shape is.

    Returns:
        ``[r, c]``, float32; with a group this rank's part of the whole.
    """
    turned = matrix.shape[0] > matrix.shape[1] if group is None else cut == 0
    x = matrix.mT if turned else matrix
    x = x / _norm(x, group).clamp_min(_EPSILON)
    with _products(matrix.device, precision):
        if precision != "high":
            x = x.bfloat16()
        for a, b, c in coefficients:
            gram = x @ x.mT
            if group is not None:
                dist.all_reduce(gram, group=group)
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.float()
    return x.mT if turned else x


def scale_factor(rows: int, columns: int, mode: str) -> float:
    """Return what an orthogonalized ``[rows, columns]`` is multiplied by.

    Args:
        rows: size of the output of the linear layer.
        columns: size of its input.
        mode: ``spectral``, ``unit_rms_norm`` or ``shape_scaling``.
    """
    if mode == "spectral":
        return float(max(rows, columns) ** 0.5)
    ratio = rows / columns
    return float(ratio**0.5 if mode == "unit_rms_norm" else max(1.0, ratio) ** 0.5)


def _norm(x: torch.Tensor, group: Any) -> torch.Tensor:
    if group is None:
        return torch.linalg.vector_norm(x)
    squares = x.square().sum()
    dist.all_reduce(squares, group=group)
    return squares.sqrt()


@contextmanager
def _products(device: torch.device, precision: str) -> Iterator[None]:
    """Allow products of float32 numbers in TF32; a CPU multiplies them as they are."""
    if device.type == "cpu" or precision != "high":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
