"""The hidden state, whole and spread over the grid; and heads in exchange for positions over the y group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed_tp.grid.place import Place
from mindspeed_tp.rows import Rows


def _gathered(x: Tensor, place: Place) -> Tensor:
    """Return ``[s, b, h]`` of ``[s / x, b, h / y]``."""
    if place.x.size() > 1:
        x = Rows(place.x).start_gather(x)()
    if place.y.size() > 1:
        features = Rows(place.y).start_gather(x.permute(2, 0, 1).contiguous())()
        x = features.permute(1, 2, 0)
    return x.contiguous()


def _part(x: Tensor, place: Place) -> Tensor:
    """Return this rank's ``[s / x, b, h / y]`` of ``[s, b, h]``."""
    (size_x, size_y), (i, j) = place.size, place.rank
    return x.chunk(size_x, 0)[i].chunk(size_y, -1)[j].contiguous()


class GatheredHidden(torch.autograd.Function):
    """From this rank's part of the hidden state to all of it, whose gradient is the same on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Place) -> Tensor:
        """Gather."""
        ctx.place = place
        return _gathered(x, place)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Take this rank's part."""
        return _part(gradients[0], ctx.place), None


class SpreadHidden(torch.autograd.Function):
    """From the hidden state that every rank has to this rank's part of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Place) -> Tensor:
        """Take this rank's part."""
        ctx.place = place
        return _part(x, place)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Gather."""
        return _gathered(gradients[0], ctx.place), None


class _Exchange(torch.autograd.Function):
    """Chunk ``i`` of the first dimension goes to rank ``i``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        result = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(result, x.contiguous(), group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(gradients[0], ctx.group), None


def heads_for_positions(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return ``[s, b, n / y, d]`` of ``[s / y, b, n, d]``."""
    y = group.size()
    if y == 1:
        return x
    s, b, n, d = x.shape
    sent = x.reshape(s, b, y, n // y, d).permute(2, 0, 1, 3, 4)
    result: Tensor = _Exchange.apply(sent, group)
    return result.reshape(y * s, b, n // y, d)


def positions_for_heads(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return ``[s / y, b, n, d]`` of ``[s, b, n / y, d]``."""
    y = group.size()
    if y == 1:
        return x
    s, b, n, d = x.shape
    received: Tensor = _Exchange.apply(x.reshape(y, s // y, b, n, d), group)
    return received.permute(1, 2, 0, 3, 4).reshape(s // y, b, y * n, d)
