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

from mindspeed_core.errors import SessionError
from mindspeed_tp.linear_function import Communication, DelayedGradients, How, Leave, PlannedLinearFunction
from mindspeed_tp.plan import DELAYED, LinearPlan
from mindspeed_tp.rows import Rows

DIRECT = LinearPlan()
"""One thing after the other."""


class DelaysWeightGradients:
    """Delay of a linear layer's weight gradient, and its reduction over data-parallel ranks.

    A delayed gradient reaches the hooks of data parallelism when it exists: with
    ``DistributedDataParallelConfig(delay_wgrad_compute=True)`` they are registered here instead of at the
    parameter.
    """

    weight: Any

    def follow(self, plan: LinearPlan) -> None:
        """Let gradients of a plan that delays them wait for `backward_dw`."""
        self._delayed = DelayedGradients()
        self._leave: Leave | None = None
        self._hooks: list[Callable[[], None]] = []
        if plan.weight_gradient == DELAYED:
            self.put_off_weight_gradients(self._delayed.leave)

    def put_off_weight_gradients(self, leave: Leave) -> None:
        """Hand computations of the weight's gradient to somebody, instead of doing them in backward.

        Call it before data parallelism wraps the module.

        Args:
            leave: takes each computation and its operands, and calls it with them, later or at once.
        """
        self._leave = leave
        if self.weight is not None:
            self.weight.skip_backward_post_hook = True

    def backward_dw(self) -> None:
        """Compute the gradient that waits longest; without one nothing happens."""
        self._delayed.compute_oldest()

    def leave_for(self, weight: Any) -> Leave | None:
        """Return who takes computations of this weight's gradient; None where backward does them."""
        return None if self._leave is None or weight is not self.weight else self._put_off

    def _put_off(self, compute: Callable[..., None], *operands: Tensor) -> None:
        assert self._leave is not None

        def whole(*operands: Tensor) -> None:
            if not self._hooks and hasattr(self.weight, "main_grad"):
                raise SessionError(
                    "gradients of weights come later than in backward, and data parallelism does not wait "
                    "for them; wrap the model with DistributedDataParallelConfig(delay_wgrad_compute=True)"
                )
            compute(*operands)
            for hook in self._hooks:
                hook()

        self._leave(whole, *operands)

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
            self.leave_for(weight),
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
        how = How(self.plan, groups, self.gradient_accumulation_fusion, self.leave_for(self.weight))
        output = PlannedLinearFunction.apply(input_, self.weight, None, how)
        if self.skip_bias_add:
            return output, self.bias
        return (output if self.bias is None else output + self.bias), None
