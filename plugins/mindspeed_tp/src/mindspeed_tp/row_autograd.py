"""Sums of rows scattered over a group, followed by autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_tp.rows import Rows


class ScatteredRows(torch.autograd.Function):
    """Sum ``[s, ...]`` over the ranks and leave each its part; backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows) -> Tensor:
        """Sum and scatter."""
        ctx.rows = rows
        return rows.start_scatter(x.contiguous())()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Gather."""
        return ctx.rows.start_gather(gradients[0])(), None
