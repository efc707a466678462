"""Contracts of the device's kernels: accepted arguments, computed values, memory that is left unwritten.

A `Kernel` states, from the vendor's published sources, what one operation takes and returns. Its values are
computed in float64 by formulas of their own, never by the code under test, so that a wrong scale, sign,
layout or cumulative end shows as a wrong number. Kernels see tensors on the CPU; which device these stand
for is the business of whoever calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

SOCS = ("310P", "910B", "910_93", "950")
"""Generations of the device whose calls differ, as CANN names them."""


class KernelRefusal(RuntimeError):
    """A call that the device would refuse."""


class Arguments(Mapping[str, Any]):
    """The arguments of one call by the names of its schema, defaults included.

    Attributes:
        soc: the generation of the device, one of `SOCS`.
        requiring_grad: names of tensors that require grad, which kernels are told.
    """

    def __init__(
        self, values: Mapping[str, Any], soc: str = "910B", requiring_grad: Collection[str] = ()
    ) -> None:
        """Take every argument of the schema."""
        self._values, self.soc, self.requiring_grad = dict(values), soc, frozenset(requiring_grad)

    def __getitem__(self, name: str) -> Any:
        """Return an argument."""
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, in the order of the schema."""
        return iter(self._values)

    def __len__(self) -> int:
        """Return the number of arguments."""
        return len(self._values)


@dataclass(frozen=True)
class Source:
    """A published file that a contract was read from.

    Attributes:
        repository: for instance ``ops-transformer``.
        path: the file inside it.
        commit: the commit that was read, in full or abbreviated.
        read: the day, ISO.
    """

    repository: str
    path: str
    commit: str
    read: str


@dataclass(frozen=True)
class Rule:
    """Something that the device checks, or needs without checking.

    Attributes:
        text: what must hold: ``"sink is float32 [N]"``.
        holds: judges a call.
        socs: the generations that ask for it.
        of_values: whether it reads the numbers in tensors, which fake tensors do not have.
    """

    text: str
    holds: Callable[[Arguments], bool]
    socs: tuple[str, ...] = SOCS
    of_values: bool = False


@dataclass(frozen=True)
class Kernel:
    """The contract of one operation.

    Attributes:
        operation: its schema's name, with overload if there is one: ``npu::npu_rms_norm``.
        rules: what a call must keep, in the order in which they are checked.
        compute: returns the outputs of a call that keeps them, as the schema says; arguments that the schema
            marks as written are changed in place.
        sources: where all of it is published.
        unwritten: which outputs the device leaves uninitialised, and when; they are filled by `unwritten`.
        differs: defaults and meanings that a reader would not expect.
        socs: the generations that have the kernel.
    """

    operation: str
    rules: tuple[Rule, ...]
    compute: Callable[[Arguments], Any]
    sources: tuple[Source, ...]
    unwritten: str = ""
    differs: tuple[str, ...] = field(default=())
    socs: tuple[str, ...] = SOCS

    def check(self, arguments: Arguments, *, values: bool = True) -> None:
        """Check a call against the rules.

        Args:
            arguments: of the call.
            values: whether its tensors have numbers; without, rules about these are left out.

        Raises:
            KernelRefusal: names the rule that the call breaks.
        """
        if arguments.soc not in self.socs:
            raise KernelRefusal(f"{self.operation}: not on Ascend {arguments.soc}, on {', '.join(self.socs)}")
        for rule in self.rules:
            asked = arguments.soc in rule.socs and (values or not rule.of_values)
            if asked and not rule.holds(arguments):
                raise KernelRefusal(f"{self.operation} on Ascend {arguments.soc}: {rule.text}")

    def run(self, arguments: Arguments) -> Any:
        """Check a call and compute it.

        Raises:
            KernelRefusal: names the rule that the call breaks.
        """
        self.check(arguments)
        return self.compute(arguments)


def unwritten(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
    """Return memory as a kernel leaves it that does not write: NaN, or an integer's largest value."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full(shape, float("nan"), dtype=dtype)
    return torch.full(shape, True if dtype == torch.bool else torch.iinfo(dtype).max, dtype=dtype)
