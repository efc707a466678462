"""Lion ("Symbolic Discovery of Optimization Algorithms", arXiv 2302.06675): one moment in place of two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mindspeed_core import DescribedOptimizer


class Lion(DescribedOptimizer):
    """The update is the sign of an interpolation of momentum and gradient."""

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        """Take megatron-core's groups of parameters."""
        super().__init__(param_groups, {"lion_betas": (0.9, 0.99)})

    def new_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return momentum of zeros, under the name of Adam's first moment."""
        return {"exp_avg": torch.zeros_like(parameter)}

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: Mapping[str, Any]
    ) -> None:
        """Decay the parameter and move it by the learning rate in each direction."""
        momentum, (beta1, beta2) = state["exp_avg"], group["lion_betas"]
        direction = momentum.lerp(gradient, 1 - beta1).sign_()
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
        momentum.lerp_(gradient, 1 - beta2)
