"""AdamW by torch's fused kernel, with an exponential moving average of the parameters beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mindspeed_core import DescribedOptimizer
from mindspeed_megatron.described_optimizer import MOMENTS, local_part
from mindspeed_optim.rules.fused_adamw import fused_kernel

EMA = "ema_params"
"""Name of the average in states and checkpoints, as in MindSpeed."""
UPDATES = "ema_updates"
"""Key of the count of updates of the average, in every group of parameters."""


class EmaAdamW(DescribedOptimizer):
    """AdamW, and ``ema = d ema + (1 - d) p`` after each update.

    ``d`` is ``min(decay, (1 + n) / (10 + n))`` in update ``n`` of the average, from 1: the average forgets
    where training began. The count is kept apart from the steps of AdamW, since an average may begin in a run
    that goes on.
    """

    further = (EMA,)
    counts = (UPDATES,)

    def __init__(self, param_groups: list[dict[str, Any]], decay: float, *, decoupled: bool = True) -> None:
        """Take megatron-core's groups of parameters.

        Args:
            param_groups: the groups.
            decay: the largest factor of the average, from 0 to 1.
            decoupled: weight decay is AdamW's; otherwise it is added to the gradient, as in Adam.
        """
        self._decoupled = decoupled
        super().__init__(param_groups, {"ema_decay": decay})

    def new_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return moments of zeros, and an average that is the parameter."""
        return {**{name: torch.zeros_like(parameter) for name in MOMENTS}, EMA: parameter.clone()}

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: Mapping[str, Any]
    ) -> None:
        """Update one parameter by itself."""
        self._launch([parameter], [gradient], [state], group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters of a group, and their averages, in two launches."""
        for group in self.param_groups:
            group["step"] += 1
            group[UPDATES] += 1
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
        states: list[dict[str, Any]],
        group: Mapping[str, Any],
    ) -> None:
        if not parameters:
            return
        moments = [[state[name] for state in states] for name in MOMENTS]
        fused_kernel(parameters, gradients, moments, group["step"], group, decoupled=self._decoupled)
        torch._foreach_lerp_([state[EMA] for state in states], parameters, 1 - decay_at(group))


def decay_at(group: Mapping[str, Any]) -> float:
    """Return the factor of the average in the update that a group counts."""
    count = group[UPDATES]
    return float(min(group["ema_decay"], (1 + count) / (10 + count)))
