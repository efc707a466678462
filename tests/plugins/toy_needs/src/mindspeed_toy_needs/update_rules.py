"""Optimizers whose state has another form than Adam's: 16 bits, blocks of 8 bits, further tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from acme_five.lion import Lion
from mindspeed_core import DescribedOptimizer

Blocks = tuple[torch.Tensor, torch.Tensor]


class SignOfMomentum(DescribedOptimizer):
    """One moment in bfloat16, under a name of its own; the update is its sign."""

    def new_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Momentum of zeros."""
        return {"momentum": torch.zeros_like(parameter, dtype=torch.bfloat16)}

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: Mapping[str, Any]
    ) -> None:
        """Move by the learning rate in each direction."""
        momentum = state["momentum"].float().lerp_(gradient, 1 - group["betas"][0])
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(momentum.sign(), alpha=group["lr"])
        state["momentum"].copy_(momentum)

    def describe(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        """The momentum is a first moment."""
        return {"exp_avg": state["momentum"].float()}

    def restore(self, parameter: torch.Tensor, described: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Take the first moment."""
        return {"momentum": described["exp_avg"].bfloat16()}


class Int8Adam(DescribedOptimizer):
    """Adam with moments of 8 bits in flat blocks.

    Scales are powers of two and the second moment is kept as its root, so that `restore` is the exact inverse
    of `describe`.
    """

    def new_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Moments of zeros."""
        return {"first": _blocks(parameter * 0), "root": _blocks(parameter * 0)}

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: Mapping[str, Any]
    ) -> None:
        """Do as torch's AdamW, with moments that are rounded after each step."""
        (beta1, beta2), step, rate = group["betas"], group["step"], group["lr"]
        first = _whole(state["first"], parameter).lerp_(gradient, 1 - beta1)
        second = _whole(state["root"], parameter).square_().mul_(beta2)
        second.addcmul_(gradient, gradient, value=1 - beta2)
        divisor = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
        parameter.mul_(1 - rate * group["weight_decay"])
        parameter.addcdiv_(first / (1 - beta1**step), divisor, value=-rate)
        state["first"], state["root"] = _blocks(first), _blocks(second.sqrt_())

    def describe(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        """Both moments in float32."""
        root = _whole(state["root"], parameter)
        return {"exp_avg": _whole(state["first"], parameter), "exp_avg_sq": root.square_()}

    def restore(self, parameter: torch.Tensor, described: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Round both moments to 8 bits."""
        return {"first": _blocks(described["exp_avg"]), "root": _blocks(described["exp_avg_sq"].sqrt())}


class AveragedMomentum(DescribedOptimizer):
    """Momentum, and beside it an average of the parameter and three facts of its gradients."""

    further = ("average", "sum", "last", "largest")

    def new_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """The average starts from the parameter, everything else from zeros."""
        zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "sum", "last", "largest")}
        return {**zeros, "average": parameter.clone()}

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: Mapping[str, Any]
    ) -> None:
        """Move along the momentum."""
        parameter.sub_(state["exp_avg"].lerp_(gradient, 0.1), alpha=group["lr"])
        state["average"].lerp_(parameter, 0.5)
        state["sum"].add_(gradient)
        state["last"].copy_(gradient)
        state["largest"].copy_(torch.maximum(state["largest"], gradient.abs()))


def _blocks(tensor: torch.Tensor, size: int = 128) -> Blocks:
    """Values of 8 bits ``[blocks, size]`` and their scales ``[blocks, 1]``."""
    blocks = torch.nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % size)).view(-1, size)
    largest = blocks.abs().amax(1, keepdim=True).clamp_min(2.0**-60)
    scale = torch.exp2(torch.log2(largest / 127).ceil())
    return (blocks / scale).round_().to(torch.int8), scale


def _whole(blocks: Blocks, like: torch.Tensor) -> torch.Tensor:
    values, scale = blocks
    return (values * scale).flatten()[: like.numel()].view_as(like)


RULES: Mapping[str, type[DescribedOptimizer]] = {
    "toy-lion": Lion,
    "toy-sign": SignOfMomentum,
    "toy-int8": Int8Adam,
    "toy-averaged": AveragedMomentum,
}
"""Values of ``--optimizer``."""
