"""Lion inside megatron-core's optimizer, with a momentum that is flat while training.

Source: "Symbolic Discovery of Optimization Algorithms" (arXiv 2302.06675).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer


class Lion(torch.optim.Optimizer):
    """The update is the sign of an interpolation of momentum and gradient."""

    def __init__(self, param_groups: Any, beta1: float = 0.9, beta2: float = 0.99) -> None:
        super().__init__(param_groups, {"lion_betas": (beta1, beta2)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            beta1, beta2 = group["lion_betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, gradient = self.state[parameter], parameter.grad.flatten()
                momentum = state.setdefault("momentum", torch.zeros_like(gradient))
                direction = momentum.lerp(gradient, 1 - beta1).sign_().view_as(parameter)
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
                momentum.lerp_(gradient, 1 - beta2)

    def allocate(self) -> None:
        """Give every parameter its momentum, in the canonical form."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("momentum", torch.zeros_like(parameter.data))

    def to_canonical(self) -> None:
        """Momentum in the shape of its parameter, as checkpoints hold it."""
        for parameter, state in self.state.items():
            state["momentum"] = state["momentum"].view_as(parameter)

    def to_training(self) -> None:
        """Momentum flat, as `step` expects it."""
        for state in self.state.values():
            state["momentum"] = state["momentum"].flatten()


def put_into(optimizer: MegatronOptimizer) -> list[Lion]:
    """Replace the inner optimizers; parameter groups and their learning rates stay."""
    replaced = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        part.optimizer = Lion(part.optimizer.param_groups)
        part.init_state_fn = lambda lion, config=None: lion.allocate()
        replaced.append(part.optimizer)
    return replaced
