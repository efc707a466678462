"""Bytes that a rank keeps between steps by closed formulas, to be set beside what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mindspeed_megatron.formulas import evaluate
from mindspeed_megatron.instruments.held_tensors import (
    GRADIENTS,
    MAIN_PARAMETERS,
    OPTIMIZER_STATE,
    PARAMETERS,
)
from mindspeed_megatron.unwrap import unwrap

if TYPE_CHECKING:
    from mindspeed_core.feature import Feature
    from mindspeed_core.run import Run

OPTIMIZER = f"{MAIN_PARAMETERS} and {OPTIMIZER_STATE}"
"""Both together: features keep one in the form of the other."""
_QUANTITY = "optimizer_bytes_per_parameter"


class Formula(NamedTuple):
    """A closed formula and its value in bytes."""

    text: str
    bytes: int


def kept_bytes(run: Run, active: Iterable[type[Feature]]) -> dict[str, Formula]:
    """Return the formulas of parameters, gradients, and what the optimizer keeps, by name.

    Args:
        run: with model and groups.
        active: the features, whose own formulas of the optimizer's bytes hold.
    """
    parameters = [p for chunk in run.model for p in unwrap(chunk).parameters()]
    learning = [p for p in parameters if p.requires_grad]
    shared = [p for p in learning if getattr(p, "allreduce", True)]
    experts = [p for p in learning if not getattr(p, "allreduce", True)]
    size = parameters[0].element_size() if parameters else 4
    gradient = next((p.main_grad.element_size() for p in learning if _has_buffer(p)), size)
    each = _optimizer_bytes(run.args, active, size)
    sharded = bool(getattr(run.args, "use_distributed_optimizer", False))
    dense_ranks = run.pg.dp_cp.size() if sharded else 1
    expert_ranks = run.pg.expt_dp.size() if sharded and experts else 1
    held = _count(shared) / dense_ranks + _count(experts) / expert_ranks
    share = "/DP" if sharded else ""
    return {
        PARAMETERS: Formula(f"{size} N", sum(p.numel() * p.element_size() for p in parameters)),
        GRADIENTS: Formula(f"{gradient} N", gradient * _count(learning)),
        OPTIMIZER: Formula(f"{each:g} N{share}", round(each * held)),
    }


def _optimizer_bytes(args: Any, active: Iterable[type[Feature]], size: int) -> float:
    """Return the bytes of a parameter's state, the smallest that an active feature states."""
    values = vars(args) | {"data_parallel_size": 1, "use_distributed_optimizer": False, "element_size": size}
    stated = [evaluate(f.formulas[_QUANTITY], values) for f in active if _QUANTITY in f.formulas]
    return min(stated, default=12.0 if size < 4 else 8.0)


def _has_buffer(parameter: Any) -> bool:
    return getattr(parameter, "main_grad", None) is not None


def _count(parameters: Sequence[Any]) -> int:
    return sum(parameter.numel() for parameter in parameters)
