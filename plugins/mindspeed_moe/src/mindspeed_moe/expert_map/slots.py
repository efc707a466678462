"""The tensors of the experts in their slots: weights, what the optimizer keeps of them, gradients.

A slot is a range of a parameter, or several parameters: grouped experts hold one parameter for all slots,
sequential experts their own ones. Of what the optimizer keeps, a rank may hold a part that begins and ends
inside an expert: the distributed optimizer cuts buffers, not experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from mindspeed_core.errors import SessionError

STATES = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
"""State that optimizers keep of each element of a parameter, by the value of ``--optimizer``."""


@dataclass(frozen=True)
class Part:
    """The elements of a parameter that this rank holds of something, and the group that holds them all.

    Attributes:
        first: index of the first one in the flat parameter.
        tensors: flat, of as many elements each; None for what does not exist yet.
        group: ranks that hold the other parts; None where this rank holds all.
    """

    first: int
    tensors: tuple[Tensor | None, ...]
    group: Any = None


@dataclass(frozen=True)
class Slot:
    """One weight of the expert in a slot.

    Attributes:
        parameter: that holds it.
        first: index of its first element in the flat parameter.
        length: its elements.
    """

    parameter: torch.nn.Parameter
    first: int
    length: int


def slots_of(experts: Any) -> list[list[Slot]]:
    """Return the slots of this rank for every weight of a layer's experts, the same order on all ranks.

    Args:
        experts: the module, grouped or sequential.
    """
    count = experts.num_local_experts
    if hasattr(experts, "local_experts"):
        each = [list(expert.parameters()) for expert in experts.local_experts]
        return [[Slot(parameter, 0, parameter.numel()) for parameter in kind] for kind in zip(*each)]
    return [
        [
            Slot(parameter, slot * (parameter.numel() // count), parameter.numel() // count)
            for slot in range(count)
        ]
        for parameter in experts.parameters()
    ]


def weight(parameter: torch.nn.Parameter) -> Part:
    """Return the values that the model computes with."""
    return Part(0, (parameter.detach().view(-1),))


def optimizer_part(optimizer: Any, names: Sequence[str], parameter: torch.nn.Parameter) -> Part | None:
    """Return this rank's part of the main parameter and of what the optimizer keeps of it.

    Args:
        optimizer: megatron-core's.
        names: what it keeps of each element.
        parameter: of the model.

    Returns:
        The main parameter first, None where the model computes with it; no part at all for a parameter that
        is not trained.

    Raises:
        SessionError: the optimizer keeps something else.
    """
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        if getattr(inner, "is_stub_optimizer", False):
            continue
        if isinstance(inner, DistributedOptimizer):
            if parameter in _parameters_of_buffers(inner):
                return _sharded_part(inner, names, parameter)
            continue
        main = getattr(parameter, "main_param", None)
        main = parameter if main is None else main
        if any(main is other for group in inner.optimizer.param_groups for other in group["params"]):
            own = None if main is parameter else main.detach().view(-1)
            return Part(0, (own, *_states(inner.optimizer.state.get(main, {}), names, main)))
    return None


def gradient_part(optimizer: Any, parameter: torch.nn.Parameter) -> Part:
    """Return this rank's part of the reduced gradient."""
    gradient: Tensor | None = getattr(parameter, "main_grad", None)
    if gradient is None:
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    gradient = gradient.detach().view(-1)
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(inner, DistributedOptimizer) and parameter in _parameters_of_buffers(inner):
            first, end = _range(inner, parameter)
            return Part(first, (gradient[first:end],), inner.data_parallel_group)
    return Part(0, (gradient,))


def _parameters_of_buffers(inner: Any) -> Any:
    return {parameter for buffer in inner.buffers for parameter in buffer.params}


def _sharded_part(inner: Any, names: Sequence[str], parameter: torch.nn.Parameter) -> Part:
    first, end = _range(inner, parameter)
    if first == end:
        return Part(0, (None,) * (len(names) + 1), inner.data_parallel_group)
    group, order = inner.model_param_group_index_map[parameter]
    main = inner.optimizer.param_groups[group]["params"][order]
    shares = main.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
    own = None if shares else main.detach().view(-1)
    states = _states(inner.optimizer.state.get(main, {}), names, main)
    return Part(first, (own, *states), inner.data_parallel_group)


def _range(inner: Any, parameter: torch.nn.Parameter) -> tuple[int, int]:
    """Return where this rank's part of a parameter begins and ends; both 0 for none."""
    if parameter not in inner.model_param_gbuf_map:
        return 0, 0
    found = inner._get_model_param_range_map(parameter)["param"]
    return found.start, found.end


def _states(state: Any, names: Sequence[str], main: Tensor) -> tuple[Tensor | None, ...]:
    for name, value in state.items():
        if isinstance(value, Tensor) and name not in names and name != "step":
            raise SessionError(
                f"--enable-expert-placement: the optimizer keeps {name!r} of each parameter, which does not "
                "move with an expert; use --optimizer adam or sgd, or drop --enable-expert-placement"
            )
    found = [state.get(name) for name in names]
    return tuple(None if value is None else value.detach().view(-1) for value in found)
