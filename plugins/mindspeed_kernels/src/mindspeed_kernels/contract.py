"""Rules about an operator's arguments, as data: dtype, rank, sizes, ranges, choices.

The definition of an operator has a contract, which every call must keep, and each backend may add limits of
its own. They are checked on the first call of each kind (device, dtypes, ranks, options), and on every call
inside `mindspeed_kernels.ops.checking`. Sizes and numbers that are not known while a graph is traced are not
judged then.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed_kernels.call import UNKNOWN, Call, TensorFacts

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""The floating dtypes that references compute."""
NPU_FLOATING = (torch.float32, torch.bfloat16, torch.float16)
"""The floating dtypes of most kernels for Ascend devices."""
HALF = (torch.bfloat16, torch.float16)
"""The floating dtypes of those that multiply on the matrix units alone."""


class ContractError(ValueError):
    """An argument is outside of what an operator, or the backend that was forced, computes."""


@dataclass(frozen=True)
class Violation:
    """A broken rule.

    Attributes:
        argument: its name.
        rule: what it must be.
        got: what it is.
        nearest: the nearest supported choice.
    """

    argument: str
    rule: str
    got: str
    nearest: str

    def message(self, operator: str, backend: str) -> str:
        """Return one line: operator, backend, argument, rule, value and the nearest supported choice."""
        return (
            f"{operator}[{backend}]: {self.argument} {self.rule}, got {self.got}; "
            f"nearest supported: {self.nearest}"
        )


class Rule(ABC):
    """One rule about the arguments of a call."""

    def broken(self, call: Call) -> Violation | None:
        """Return the violation, or None when the call keeps the rule or the argument is absent or unknown."""
        return self._violation(call)

    @abstractmethod
    def _violation(self, call: Call) -> Violation | None: ...


Contract = tuple[Rule, ...]


def first_violation(contract: Iterable[Rule], call: Call) -> Violation | None:
    """Return the first broken rule of a contract."""
    violations = (rule.broken(call) for rule in contract)
    return next((violation for violation in violations if violation is not None), None)


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``bfloat16`` instead of ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def _facts(call: Call, name: str) -> list[TensorFacts]:
    value = call[name]
    items = value if isinstance(value, tuple) else (value,)
    return [item for item in items if isinstance(item, TensorFacts)]


def _size(call: Call, name: str, dimension: int) -> int | None:
    """Return the size of one dimension, None where it is absent or not known."""
    found = _facts(call, name)
    if not found or found[0].shape is None or not -found[0].rank <= dimension < found[0].rank:
        return None
    return found[0].shape[dimension]


@dataclass(frozen=True)
class Dtype(Rule):
    """Tensor ``argument`` (each tensor of a list) has one of ``dtypes``."""

    argument: str
    dtypes: tuple[torch.dtype, ...] = FLOATING

    def _violation(self, call: Call) -> Violation | None:
        for facts in _facts(call, self.argument):
            if facts.dtype not in self.dtypes:
                names = ", ".join(map(dtype_name, self.dtypes))
                return Violation(
                    self.argument, f"dtype must be one of {names}", dtype_name(facts.dtype), names
                )
        return None


@dataclass(frozen=True)
class SameDtype(Rule):
    """Tensors ``arguments`` have one dtype, that of the first which is given."""

    arguments: tuple[str, ...]

    def _violation(self, call: Call) -> Violation | None:
        found = [(name, facts.dtype) for name in self.arguments for facts in _facts(call, name)]
        for name, dtype in found[1:]:
            if dtype != found[0][1]:
                wanted = dtype_name(found[0][1])
                return Violation(name, f"dtype must be that of {found[0][0]}", dtype_name(dtype), wanted)
        return None


@dataclass(frozen=True)
class Rank(Rule):
    """Tensor ``argument`` has between ``low`` and ``high`` dimensions."""

    argument: str
    low: int
    high: int

    def _violation(self, call: Call) -> Violation | None:
        for facts in _facts(call, self.argument):
            if not self.low <= facts.rank <= self.high:
                ranks = str(self.low) if self.low == self.high else f"{self.low} to {self.high}"
                nearest = min(max(facts.rank, self.low), self.high)
                shape = "" if facts.shape is None else f" {facts.shape}"
                got = f"{facts.rank}{shape}"
                return Violation(self.argument, f"must have {ranks} dimensions", got, str(nearest))
        return None


@dataclass(frozen=True)
class Divisible(Rule):
    """Size ``dimension`` of tensor ``argument`` is a multiple of ``by``."""

    argument: str
    dimension: int
    by: int

    def _violation(self, call: Call) -> Violation | None:
        size = _size(call, self.argument, self.dimension)
        if size is None or size % self.by == 0:
            return None
        below, above = size // self.by * self.by, (size // self.by + 1) * self.by
        rule = f"size of dimension {self.dimension} must be a multiple of {self.by}"
        return Violation(self.argument, rule, str(size), f"{above}" if not below else f"{below} or {above}")


@dataclass(frozen=True)
class Size(Rule):
    """Size ``dimension`` of tensor ``argument`` lies between ``low`` and ``high``, both included."""

    argument: str
    dimension: int
    low: int
    high: int

    def _violation(self, call: Call) -> Violation | None:
        size = _size(call, self.argument, self.dimension)
        if size is None or self.low <= size <= self.high:
            return None
        rule = f"size of dimension {self.dimension} must be {self.low} to {self.high}"
        return Violation(self.argument, rule, str(size), str(min(max(size, self.low), self.high)))


@dataclass(frozen=True)
class SameSize(Rule):
    """Size ``dimension`` of ``argument`` equals size ``of_dimension`` of ``of``."""

    argument: str
    dimension: int
    of: str
    of_dimension: int

    def _violation(self, call: Call) -> Violation | None:
        size, wanted = _size(call, self.argument, self.dimension), _size(call, self.of, self.of_dimension)
        if size is None or wanted is None or size == wanted:
            return None
        rule = (
            f"size of dimension {self.dimension} must be that of dimension {self.of_dimension} of {self.of}"
        )
        return Violation(self.argument, rule, str(size), str(wanted))


@dataclass(frozen=True)
class SameShape(Rule):
    """Tensor ``argument`` has the shape of tensor ``of``."""

    argument: str
    of: str

    def _violation(self, call: Call) -> Violation | None:
        facts, other = _facts(call, self.argument), _facts(call, self.of)
        if not facts or not other or facts[0].shape is None or facts[0].shape == other[0].shape:
            return None
        return Violation(
            self.argument, f"must have the shape of {self.of}", str(facts[0].shape), str(other[0].shape)
        )


@dataclass(frozen=True)
class Range(Rule):
    """Number ``argument`` lies between ``low`` and ``high``, both included; None is fine."""

    argument: str
    low: float
    high: float

    def _violation(self, call: Call) -> Violation | None:
        value = call[self.argument]
        if value is None or value is UNKNOWN or isinstance(value, TensorFacts):
            return None
        if self.low <= value <= self.high:
            return None
        rule = f"must be {self.low} to {self.high}"
        return Violation(self.argument, rule, str(value), str(min(max(value, self.low), self.high)))


@dataclass(frozen=True)
class Choice(Rule):
    """``argument`` is one of ``values``; text is compared without regard to case."""

    argument: str
    values: tuple[Any, ...]

    def _violation(self, call: Call) -> Violation | None:
        value = call[self.argument]
        plain = value.lower() if isinstance(value, str) else value
        known = [item.lower() if isinstance(item, str) else item for item in self.values]
        if value is UNKNOWN or plain in known:
            return None
        names = ", ".join(map(str, self.values))
        return Violation(self.argument, f"must be one of {names}", repr(value), names)


@dataclass(frozen=True)
class Holds(Rule):
    """Anything else: ``judge`` returns the value that is wrong and the nearest supported one, or None.

    The function sees a `Call` in which sizes may be ``None`` and values `UNKNOWN`; it returns None then.
    """

    argument: str
    rule: str
    judge: Callable[[Call], tuple[Any, Any] | None]

    def _violation(self, call: Call) -> Violation | None:
        wrong = self.judge(call)
        return None if wrong is None else Violation(self.argument, self.rule, str(wrong[0]), str(wrong[1]))


@dataclass(frozen=True)
class NotEmpty(Rule):
    """Tensor ``argument`` has elements: kernels of the device refuse one without, forward or backward."""

    argument: str

    def _violation(self, call: Call) -> Violation | None:
        facts = _facts(call, self.argument)
        if not facts or facts[0].shape is None or 0 not in facts[0].shape:
            return None
        return Violation(self.argument, "must have elements", str(facts[0].shape), "sizes above 0")
