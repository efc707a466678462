"""Rules of contracts on tensors without values: those about shapes, dtypes, strides and options.

A fake device runs calls of real sizes, so that a limit of a kernel shows there first. Every call is judged;
those that agree in all of that share one judgement.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor

from mindspeed_testing.npu.kernels import all_kernels
from mindspeed_testing.npu.kernels.contract import Arguments
from mindspeed_testing.npu.soc import announced_soc


class ShapeRules:
    """The calls that a fake device has judged; see the module."""

    def __init__(self) -> None:
        """Judge for the generation of the device that this process was started with."""
        self._soc = announced_soc()
        self._sound: set[Hashable] = set()

    def check(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Check a call; an operation without contract takes every one.

        Raises:
            KernelRefusal: names the rule that the call breaks.
        """
        kernel = all_kernels().get(func.name())
        if kernel is None:
            return
        values = bound_arguments(func, args, kwargs)
        call = (func, *map(_facts, values.values()))
        if call in self._sound:
            return
        requiring = [name for name, v in values.items() if isinstance(v, Tensor) and v.requires_grad]
        kernel.check(Arguments(values, self._soc, requiring), values=False)
        self._sound.add(call)


def _facts(value: Any) -> Hashable:
    """Return what rules without numbers can see of an argument."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.stride(), value.requires_grad
    if isinstance(value, (list, tuple)):
        return tuple(map(_facts, value))
    # 1, 1.0 and True are equal, and a rule may tell them apart.
    return type(value), value


def bound_arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return every argument of a call by its name in the schema, defaults included."""
    values: dict[str, Any] = {}
    for index, argument in enumerate(func._schema.arguments):
        if index < len(args):
            values[argument.name] = args[index]
        else:
            values[argument.name] = kwargs.get(argument.name, argument.default_value)
    return values
