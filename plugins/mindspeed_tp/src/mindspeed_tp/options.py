"""The plans of linears, from the arguments of all active features; no torch."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindspeed_tp.plan import Execution, LinearPlans


LINEARS, COC, MC2, RECOMPUTE = "tp-linear", "coc", "mc2", "recompute-comm"
GRID, UNEVEN = "tp-2d", "unaligned-linear"
"""Names of features: the planned linears; products in parts; products and communication in one kernel;
recomputation without communication; weights cut in two dimensions; weights cut unevenly."""
AUTO, ORIGINAL, REWRITTEN, IN_PARTS = -1, 0, 1, 2
"""Values of ``--coc-mode``."""
PARTS_WITHOUT_KERNEL = 4
"""In how many parts rows are worked on where ``--coc-fused-kernel`` finds no kernel."""


def execution_of(args: Any, active: Container[str]) -> Execution:
    """Return who executes products with communication."""
    from mindspeed_tp.coc_config import shapes_of
    from mindspeed_tp.plan import DIRECT, FUSED, PARTS, Execution

    if MC2 in active:
        return Execution(FUSED)
    if COC not in active:
        return Execution()
    if args.coc_fused_kernel:
        on_npu = getattr(args, "platform", "") == "npu"
        return Execution(FUSED) if on_npu else Execution(PARTS, PARTS_WITHOUT_KERNEL)
    if coc_mode(args) != IN_PARTS:
        return Execution(DIRECT)
    return Execution(PARTS, args.coc_parallel_num, shapes_of(args.coc_config))


def coc_mode(args: Any) -> int:
    """Return the mode of products in parts, an automatic one resolved."""
    mode = int(args.coc_mode)
    if mode != AUTO:
        return mode
    return ORIGINAL if args.coc_parallel_num == 1 and args.coc_config is None else IN_PARTS


def linear_plans(args: Any, active: Container[str]) -> LinearPlans:
    """Return the plans of the linears of a model.

    On a grid both linears gather and scatter, and one of the two is hidden: the sum of a column linear,
    which is the wider one, and the gather of a row linear.
    """
    from mindspeed_tp.plan import PARTS, RING, Execution, LinearPlan, LinearPlans

    execution = execution_of(args, active)
    if GRID not in active:
        plan = LinearPlan(gather=execution, reduce=execution, adjoint=execution)
        return LinearPlans(plan, plan)
    gather = reduce = adjoint = execution
    if args.enable_overlap_ag_with_matmul:
        gather = Execution(RING)
    if args.enable_overlap_matmul_with_rs:
        reduce = Execution(PARTS, PARTS_WITHOUT_KERNEL)
    if args.enable_backward_overlap_ag_with_matmul:
        adjoint = Execution(RING)
    return LinearPlans(
        column=LinearPlan(reduce=reduce, adjoint=adjoint), row=LinearPlan(gather=gather, adjoint=adjoint)
    )
