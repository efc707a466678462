"""Autograd formulas of torch_npu for the stand-in without the package, as op-plugin publishes them.

Source: ``op_plugin/config/derivatives.yaml`` of op-plugin, commit 517f2e7d, read 2026-11-22.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Run = Callable[[str, Mapping[str, Any]], Any]
"""Runs an operation by name without namespace and its arguments by name."""


@dataclass(frozen=True)
class Formula:
    """The derivative of one operation.

    Attributes:
        backward: the operation that computes it, by name without namespace.
        inputs: of which arguments, in the order of its outputs; empty for outputs of no argument.
        arguments: makes its arguments from those of forward, the results, and the first one's gradient.
    """

    backward: str
    inputs: tuple[str, ...]
    arguments: Callable[[Mapping[str, Any], tuple[Any, ...], Tensor], dict[str, Any]]


def follow(formula: Formula, run: Run, name: str, values: Mapping[str, Any]) -> tuple[Any, ...]:
    """Run an operation and let autograd follow its first result."""
    inputs = [item for item in formula.inputs if isinstance(values.get(item), Tensor)]
    found: tuple[Any, ...] = _Followed.apply(
        formula, run, name, values, inputs, *(values[item] for item in inputs)
    )
    return found


class _Followed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        formula: Formula,
        run: Run,
        name: str,
        values: Mapping[str, Any],
        inputs: list[str],
        *tensors: Tensor,
    ) -> tuple[Any, ...]:
        results: tuple[Any, ...] = tuple(run(name, values))
        ctx.formula, ctx.run, ctx.values, ctx.inputs, ctx.results = formula, run, values, inputs, results
        ctx.mark_non_differentiable(*(item for item in results[1:] if isinstance(item, Tensor)))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        arguments = ctx.formula.arguments(ctx.values, ctx.results, gradients[0])
        found = dict(zip(ctx.formula.inputs, ctx.run(ctx.formula.backward, arguments)))
        return (None, None, None, None, None, *(found[name] for name in ctx.inputs))


def _attention(values: Mapping[str, Any], results: tuple[Any, ...], gradient: Tensor) -> dict[str, Any]:
    renamed = {"scale": "scale_value"}
    taken = {renamed.get(name, name): value for name, value in values.items() if name != "dropout_mask"}
    state = dict(zip(("seed", "offset", "numels"), results[4:7]))
    statistics = dict(zip(("attention_in", "softmax_max", "softmax_sum", "softmax_in"), results))
    return {**taken, **statistics, **state, "dy": gradient}


FORMULAS: Mapping[str, Formula] = {
    "npu_fusion_attention": Formula(
        "npu_fusion_attention_grad", ("query", "key", "value", "pse", "sink"), _attention
    ),
    "npu_fusion_attention_v2": Formula(
        "npu_fusion_attention_grad_v2",
        ("query", "key", "value", "pse", "query_rope", "key_rope", "sink"),
        _attention,
    ),
}
"""By name of the operation, without namespace."""
