"""A call of an operator with the formula of what it must compute, and the table of generators."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from mindspeed_kernels import ops

GENERATORS: dict[str, Callable[..., Any]] = {}
"""Functions that make a `Case` of an operator from `Draws`."""
WORLD_GENERATORS: dict[str, Callable[..., Any]] = {}
"""Functions that make a `ranks.WorldCase` of an operator that communicates."""


@dataclass
class Case:
    """One call.

    ``formula`` takes the same arguments with floating tensors in float64 and returns what the operator must,
    as a tuple. Floating arguments are differentiated but for the options ``frozen``, unless ``gradients`` is
    off; the options ``requiring`` require grad even then. ``dtypes`` are those of the results, by default
    that of the first argument for each. ``changed`` is the place of an argument that the call changes,
    which then is the result. ``results`` brings what the operator returns into the form of the formula.
    ``knows`` are places of results that the formula is given, because they are random.
    """

    args: tuple[Any, ...]
    formula: Callable[..., tuple[torch.Tensor, ...]]
    options: dict[str, Any] = field(default_factory=dict)
    gradients: bool = True
    frozen: tuple[str, ...] = ()
    requiring: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] | None = None
    changed: int | None = None
    results: Callable[[Any], tuple[torch.Tensor, ...]] | None = None
    knows: tuple[int, ...] = ()
    tolerance: dict[torch.dtype, float] = field(default_factory=dict)


def generates(*names):
    def add(function):
        for name in names:
            GENERATORS[name] = function
        return function

    return add


def generates_worlds(*names):
    def add(function):
        for name in names:
            WORLD_GENERATORS[name] = function
        return function

    return add


NO_OPERATORS = ("checking", "explain", "use")
"""Functions of the package that are about operators."""


def public_operators():
    """Every operator that the package publishes or registers, by name."""
    found = dict(ops.OPERATORS)
    for name in ops.__all__:
        value = getattr(ops, name)
        if name in NO_OPERATORS or isinstance(value, (type, dict)):
            continue
        if callable(value):
            found[name] = value
        else:
            methods = (method for method in dir(value) if not method.startswith("_"))
            found |= {f"{name}.{method}": getattr(value, method) for method in methods}
    return found
