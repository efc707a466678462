"""AdamW in one launch for each group of parameters, by torch's fused kernel.

Torch's own ``AdamW(fused=True)`` wants a count of steps for every parameter, adds one to each of them, and
takes no parts of a sharded tensor. Here a group has one count, and what is given to the kernel is what this
rank has of each parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mindspeed_core import DescribedOptimizer
from mindspeed_megatron.described_optimizer import MOMENTS, local_part


def fused_kernel(
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    moments: Sequence[list[torch.Tensor]],
    step: int,
    group: Mapping[str, Any],
    *,
    decoupled: bool,
) -> None:
    """Update float32 parameters and their moments in place, in one launch for each device.

    Args:
        parameters: any shapes.
        gradients: in the same shapes and order.
        moments: first and second ones, likewise.
        step: number of this update, from 1.
        group: ``lr``, ``weight_decay``, ``betas`` and ``eps``.
        decoupled: weight decay is AdamW's; otherwise it is added to the gradient, as in Adam.
    """
    if not parameters:
        return
    # The kernel only reads the counts, so that all parameters may share one.
    count = torch.full((), float(step), dtype=torch.float32, device=parameters[0].device)
    kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
    beta1, beta2 = group["betas"]
    kernel(
        parameters,
        gradients,
        list(moments[0]),
        list(moments[1]),
        [],
        [count] * len(parameters),
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )


class FusedAdamW(DescribedOptimizer):
    """AdamW, or Adam, whose update of a group is one launch."""

    def __init__(self, param_groups: list[dict[str, Any]], *, decoupled: bool = True) -> None:
        """Take megatron-core's groups of parameters.

        Args:
            param_groups: the groups.
            decoupled: weight decay is AdamW's; otherwise it is added to the gradient, as in Adam.
        """
        self.decoupled = decoupled
        super().__init__(param_groups)

    def adam_kernel(
        self,
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor],
        *moments: list[torch.Tensor],
        step: int,
        group: Mapping[str, Any],
    ) -> None:
        """Update ranges of parameters; for an optimizer that keeps what belongs to them elsewhere."""
        fused_kernel(parameters, gradients, moments, step, group, decoupled=self.decoupled)

    def new_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return both moments, zeros in the shape of the parameter."""
        return {name: torch.zeros_like(parameter) for name in MOMENTS}

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: Mapping[str, Any]
    ) -> None:
        """Update one parameter by itself."""
        self._launch([parameter], [gradient], [state], group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters of a group that have a gradient, at once."""
        for group in self.param_groups:
            group["step"] += 1
            found = [p for p in group["params"] if p.grad is not None and local_part(p).numel()]
            self._launch(
                [local_part(parameter) for parameter in found],
                [local_part(parameter.grad) for parameter in found],
                [self.state_of(parameter) for parameter in found],
                group,
            )

    def _launch(
        self,
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor],
        states: Sequence[Mapping[str, Any]],
        group: Mapping[str, Any],
    ) -> None:
        moments = [[state[name] for state in states] for name in MOMENTS]
        self.adam_kernel(parameters, gradients, *moments, step=group["step"], group=group)
