"""Planned linears: megatron-core's column and row linears, whose communication follows a plan.

Weights, their initial values and their checkpoints are megatron-core's; the forward pass is one call of
`PlannedLinearFunction`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from torch import Tensor

from mindspeed_tp.linear_function import Communication, DelayedGradients, How, PlannedLinearFunction
from mindspeed_tp.plan import DELAYED, LinearPlan
from mindspeed_tp.rows import Rows

DIRECT = LinearPlan()
"""One thing after the other."""


class DelaysWeightGradients:
    """When the gradient of a linear's weight is computed, and what data parallelism then does with it.

    A delayed gradient reaches the hooks of data parallelism when it exists: with
    ``DistributedDataParallelConfig(delay_wgrad_compute=True)`` they are registered here instead of at the
    parameter.
    """

    delayed: DelayedGradients | None

    def follow(self, plan: LinearPlan) -> None:
        """Mark the weight of a plan whose gradients are delayed."""
        self.delayed = DelayedGradients() if plan.weight_gradient == DELAYED else None
        self._hooks: list[Callable[[], None]] = []
        if self.delayed is not None:
            self.weight.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def backward_dw(self) -> None:
        """Compute the gradient that waits longest; without one nothing happens."""
        if self.delayed is None or not self.delayed.waiting:
            return
        self.delayed.compute_oldest()
        for hook in self._hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Call a hook of data parallelism whenever a delayed gradient exists."""
        self._hooks.append(hook)


class PlannedColumn(DelaysWeightGradients, ColumnParallelLinear):
    """``ColumnParallelLinear`` that follows a plan.

    Attributes:
        plan: the policies.
        keeps_gathered: True while backward computes its product again: the gathered input then lives until
            the gradient of the weight is computed, moments later, and is not gathered once more.
    """

    def __init__(self, *args: Any, plan: LinearPlan = DIRECT, **named: Any) -> None:
        """Build the linear.

        Args:
            args: of ``ColumnParallelLinear``.
            plan: the policies.
            named: of ``ColumnParallelLinear``.
        """
        super().__init__(*args, **named)
        self.plan = plan
        self.keeps_gathered = False
        self.follow(plan)

    def communication(self) -> Communication:
        """Return the groups of a call."""
        if self.explicit_expert_comm:
            return Communication()
        if self.sequence_parallel:
            return Communication(gather=Rows(self.tp_group))
        return Communication(input_gradient=self.tp_group if self.allreduce_dgrad else None)

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Multiply ``[s, b, k]``, or this rank's rows of it; return ``[s, b, n / t]`` and an unused bias."""
        weight = self.weight if weight is None else weight
        how = How(
            self.plan,
            self.communication(),
            self.gradient_accumulation_fusion,
            self.delayed,
            self.keeps_gathered,
        )
        bias = None if self.skip_bias_add else self.bias
        output = PlannedLinearFunction.apply(input_, weight, bias, how)
        gathers = self.gather_output if runtime_gather_output is None else runtime_gather_output
        if gathers:
            output = gather_from_tensor_model_parallel_region(output, group=self.tp_group)
        return output, self.bias if self.skip_bias_add else None


class PlannedRow(DelaysWeightGradients, RowParallelLinear):
    """``RowParallelLinear`` that follows a plan.

    Attributes:
        plan: the policies.
        sums: False while its product is computed again without the sum over ranks, which only the result of
            the first pass needed.
    """

    def __init__(self, *args: Any, plan: LinearPlan = DIRECT, **named: Any) -> None:
        """Build the linear.

        Args:
            args: of ``RowParallelLinear``.
            plan: the policies.
            named: of ``RowParallelLinear``.
        """
        super().__init__(*args, **named)
        self.plan = plan
        self.sums = True
        self.follow(plan)

    def communication(self) -> Communication:
        """Return the groups of a call, its sum over ranks included."""
        if self.explicit_expert_comm or self.tp_group.size() == 1:
            return Communication()
        return Communication(reduce=Rows(self.tp_group), scatter=self.sequence_parallel)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Multiply ``[s, b, k / t]``; return ``[s, b, n]``, or this rank's rows, and an unused bias."""
        if not self.input_is_parallel:
            input_ = scatter_to_tensor_model_parallel_region(input_, group=self.tp_group)
        groups = self.communication()
        if not self.sums:
            groups = Communication(gather=groups.gather)
        how = How(self.plan, groups, self.gradient_accumulation_fusion, self.delayed)
        output = PlannedLinearFunction.apply(input_, self.weight, None, how)
        if self.skip_bias_add:
            return output, self.bias
        return (output if self.bias is None else output + self.bias), None
