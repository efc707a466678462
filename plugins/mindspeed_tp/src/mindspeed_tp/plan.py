"""Plan of a linear layer as frozen data that travels in module specifications; no torch.

A tensor-parallel linear is a gather of its input's rows, a product, and a sum over ranks. Who executes gather
and product, or product and sum, is one policy; in how many parts another; when the weight's gradient is
computed a third.
"""

from __future__ import annotations

from dataclasses import dataclass

DIRECT, PARTS, FUSED, RING = "direct", "parts", "fused", "ring"
"""Executors: one after the other; in parts, the communication of one beside the product of the next; in one
kernel where the device has it; from neighbour to neighbour, multiplying what is in hand."""

NOW, DELAYED = "now", "delayed"
"""When the gradient of a weight is computed: in backward, or when ``backward_dw`` asks for it."""

Shape = tuple[int, int, int]
"""Of a product: rows of all ranks, width that is summed over, width of the result."""


@dataclass(frozen=True)
class Execution:
    """Executor of a GEMM with its communication.

    Attributes:
        executor: `DIRECT`, `PARTS`, `FUSED` or `RING`.
        parts: in how many parts rows are worked on.
        by_shape: other numbers of parts, by the shape of the product.
    """

    executor: str = DIRECT
    parts: int = 1
    by_shape: tuple[tuple[Shape, int], ...] = ()

    def parts_of(self, shape: Shape) -> int:
        """Return the number of parts of a product."""
        return dict(self.by_shape).get(shape, self.parts)


@dataclass(frozen=True)
class LinearPlan:
    """The policies of one linear.

    Attributes:
        gather: executes the gather of the input and the product.
        reduce: executes the product and its sum over ranks.
        adjoint: executes, in backward, the gather of the result's gradient and the product with the weight.
        weight_gradient: `NOW` or `DELAYED`.
    """

    gather: Execution = Execution()
    reduce: Execution = Execution()
    adjoint: Execution = Execution()
    weight_gradient: str = NOW


@dataclass(frozen=True)
class LinearPlans:
    """The plans of the linears of a model.

    Attributes:
        column: of the first linears of attention and feed-forward.
        row: of the second ones.
    """

    column: LinearPlan = LinearPlan()
    row: LinearPlan = LinearPlan()
