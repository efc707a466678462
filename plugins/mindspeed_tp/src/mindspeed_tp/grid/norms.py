"""Normalizations of rows whose features are spread over the ranks of the y group.

Statistics are in float32. A rank sends one number per row for RMSNorm; for LayerNorm its mean and its sum of
squares around that mean, which are joined without cancellation.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mindspeed_tp.grid.gradients import learned_in_parts
from mindspeed_tp.grid.place import X, here
from mindspeed_tp.grid.spread import GatheredHidden


def _summed(x: Tensor, group: ProcessGroup) -> Tensor:
    if group.size() > 1:
        dist.all_reduce(x, group=group)
    return x


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, eps: float, size: int, group: ProcessGroup) -> Tensor:
        wide = x.float()
        squares = _summed(wide.pow(2).sum(-1, keepdim=True), group)
        rstd = torch.rsqrt(squares / size + eps)
        ctx.save_for_backward(x, scale, rstd)
        ctx.how = size, group
        return (wide * rstd * scale.float()).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, rstd = ctx.saved_tensors
        size, group = ctx.how
        dy, normal = gradients[0].float(), x.float() * rstd
        dn = dy * scale.float()
        along = _summed((dn * normal).sum(-1, keepdim=True), group)
        dx = (dn - normal * along / size) * rstd
        dscale = (dy * normal).flatten(0, -2).sum(0)
        return dx.to(x.dtype), dscale.to(scale.dtype), None, None, None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, bias: Tensor, eps: float, size: int, group: ProcessGroup
    ) -> Tensor:
        wide, ranks = x.float(), group.size()
        mean = wide.mean(-1, keepdim=True)
        around = (wide - mean).pow(2).sum(-1, keepdim=True)
        if ranks > 1:
            local = torch.stack((mean, around))
            every = local.new_empty(ranks * 2, *mean.shape)
            dist.all_gather_into_tensor(every, local, group=group)
            every = every.view(ranks, 2, *mean.shape)
            means = every[:, 0]
            mean = means.mean(0)
            around = every[:, 1].sum(0) + (means - mean).pow(2).sum(0) * (size // ranks)
        rstd = torch.rsqrt(around / size + eps)
        ctx.save_for_backward(x, scale, mean, rstd)
        ctx.how = size, group, bias.dtype
        return ((wide - mean) * rstd * scale.float() + bias.float()).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, mean, rstd = ctx.saved_tensors
        size, group, of_bias = ctx.how
        dy, normal = gradients[0].float(), (x.float() - mean) * rstd
        dn = dy * scale.float()
        sums = torch.stack((dn.sum(-1, keepdim=True), (dn * normal).sum(-1, keepdim=True)))
        along_one, along = _summed(sums, group)
        dx = (dn - along_one / size - normal * along / size) * rstd
        rows = dy.flatten(0, -2)
        dscale = (rows * normal.flatten(0, -2)).sum(0)
        return dx.to(x.dtype), dscale.to(scale.dtype), rows.sum(0).to(of_bias), None, None, None


class Norm2D(torch.nn.Module):
    """LayerNorm or RMSNorm of ``[s / x, b, h / y]`` over all of ``h``.

    Attributes:
        weight: ``[h / y]``; minus one when ``config.layernorm_zero_centered_gamma``.
        bias: ``[h / y]`` for LayerNorm, None for RMSNorm.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        """Build the norm; further arguments of megatron-core's norms are read from ``config``."""
        super().__init__()
        place = here()
        self.size, self.eps, self.group = hidden_size, eps, place.y
        self.zero_centered = config.layernorm_zero_centered_gamma
        local = hidden_size // place.y.size()
        make = torch.zeros if self.zero_centered else torch.ones
        self.weight = torch.nn.Parameter(make(local))
        self.bias = None
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(local))
        for parameter in self.parameters():
            learned_in_parts(parameter, X, counted=place.x.rank() == 0)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize; the result has the parameters' dtype."""
        scale = 1.0 + self.weight if self.zero_centered else self.weight
        if self.bias is None:
            normal = _RMSNorm.apply(hidden_states, scale, self.eps, self.size, self.group)
        else:
            normal = _LayerNorm.apply(hidden_states, scale, self.bias, self.eps, self.size, self.group)
        result: Tensor = normal.to(self.weight.dtype)
        return result

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Describe the tensors as parts of those of one rank."""
        place, before = here(), len(sharded_offsets)
        along = (before, place.y.rank(), place.y.size())
        replica = (0, place.x.rank(), metadata["dp_cp_group"].rank())
        return {
            f"{prefix}{name}": ShardedTensor.from_rank_offsets(
                f"{prefix}{name}",
                tensor,
                *sharded_offsets,
                along,
                replica_id=replica,
                prepend_axis_num=before,
            )
            for name, tensor in self.named_parameters()
        }


class FinalNorm2D(Norm2D):
    """The norm behind the last layer: its result ``[s, b, h]`` is whole on every rank."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize and gather."""
        result: Tensor = GatheredHidden.apply(super().forward(hidden_states), here())
        return result
