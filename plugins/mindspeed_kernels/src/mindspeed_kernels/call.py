"""A call of an operator as contracts and backends see it: dtypes, ranks and options by name.

Contracts and backends judge a `Call`, never tensors, so that the same rules hold for real tensors, for fake
ones and while ``torch.compile`` traces, when sizes are not numbers yet.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mindspeed_megatron.planned_kernels import kernels_for


class _Unknown:
    """Stands for a number, or something compound, whose value is not known while a graph is traced."""

    def __repr__(self) -> str:
        """Return ``unknown``, as messages show it."""
        return "unknown"


UNKNOWN = _Unknown()


@dataclass(frozen=True)
class TensorFacts:
    """Facts of a tensor argument without its values.

    Attributes:
        dtype: its dtype.
        rank: number of dimensions.
        shape: its sizes, ``None`` while a graph is traced.
        device: type of its device, ``None`` while a graph is traced.
        requires_grad: whether autograd follows it.
    """

    dtype: torch.dtype
    rank: int
    shape: tuple[int, ...] | None = None
    device: str | None = None
    requires_grad: bool = False


@dataclass(frozen=True)
class Call:
    """One kind of call of an operator.

    Attributes:
        device: type of the device of the first tensor: ``cpu``, ``cuda``, ``npu``; in a dry run that plans
            the kernels of another one, that one.
        arguments: by parameter name, defaults included: `TensorFacts` for tensors, tuples of them for lists
            of tensors, `UNKNOWN` where the value is not known, the value itself for everything else.
    """

    device: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        """Return an argument by name."""
        return self.arguments[name]

    def given(self, name: str) -> bool:
        """Return whether an optional argument is there (is not None)."""
        return self.arguments[name] is not None

    def dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype of a tensor argument, or of the first one of a list; None without tensor."""
        facts = self.arguments[name]
        if isinstance(facts, tuple) and facts:
            facts = facts[0]
        return facts.dtype if isinstance(facts, TensorFacts) else None

    def tensors(self) -> list[TensorFacts]:
        """Return the facts of every tensor argument."""
        found: list[TensorFacts] = []
        for value in self.arguments.values():
            found += [item for item in _items(value) if isinstance(item, TensorFacts)]
        return found


def call_of(signature: inspect.Signature, args: tuple[Any, ...], options: Mapping[str, Any]) -> Call:
    """Return the call with these arguments.

    Raises:
        TypeError: they do not fit the signature.
    """
    bound = signature.bind(*args, **options)
    bound.apply_defaults()
    devices = [item.device.type for value in bound.arguments.values() for item in _tensors(value)]
    facts = {name: _facts(value) for name, value in bound.arguments.items()}
    return Call(kernels_for(devices[0] if devices else "cpu"), facts)


def trace_key(args: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[Hashable, ...]:
    """Return what is constant of a call in a traced graph, as constants that ``torch.compile`` folds.

    Returns:
        ``(device type, facts of positional arguments, names and facts of the others)``.
    """
    device = ""
    for value in (*args, *options.values()):
        if not device and isinstance(value, Tensor):
            device = value.device.type
        elif not device and isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
            device = value[0].device.type
    positional = tuple([_constant(value) for value in args])
    named = tuple([(name, _constant(value)) for name, value in options.items()])
    return (kernels_for(device or "cpu"), positional, named)


def traced_call(signature: inspect.Signature, key: tuple[Any, ...]) -> Call:
    """Return the call that `trace_key` describes."""
    device, positional, named = key
    bound = signature.bind(*map(_from_constant, positional), **{n: _from_constant(v) for n, v in named})
    bound.apply_defaults()
    return Call(device, dict(bound.arguments))


def eager_key(args: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[Hashable, ...]:
    """Return what may decide about the backend of a call, for operators without a key of their own."""
    facts: list[Hashable] = []
    for value in args if not options else (*args, *options.values()):
        if isinstance(value, Tensor):
            facts.append(value.device)
            facts.append(value.dtype)
            facts.append(value.ndim)
        elif value is None or isinstance(value, (str, bool)):
            facts.append(value)
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
            facts.append(value[0].device)
            facts.append(value[0].dtype)
        else:
            facts.append(value.__class__)
    facts.extend(options)
    return tuple(facts)


def _items(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _tensors(value: Any) -> list[Tensor]:
    return [item for item in _items(value) if isinstance(item, Tensor)]


def _facts(value: Any) -> Any:
    if isinstance(value, Tensor):
        return TensorFacts(
            value.dtype, value.dim(), tuple(value.shape), value.device.type, value.requires_grad
        )
    if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
        return tuple(_facts(item) for item in value)
    return value


def _constant(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return ("tensor", value.dtype, value.ndim, value.requires_grad)
    if value is None or isinstance(value, (str, bool)):
        return ("value", value)
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
        return ("tensors", tuple([(item.dtype, item.ndim, item.requires_grad) for item in value]))
    return ("unknown",)


def _from_constant(constant: tuple[Any, ...]) -> Any:
    kind = constant[0]
    if kind == "tensor":
        return TensorFacts(constant[1], constant[2], requires_grad=constant[3])
    if kind == "tensors":
        return tuple(TensorFacts(dtype, rank, requires_grad=grad) for dtype, rank, grad in constant[1])
    return constant[1] if kind == "value" else UNKNOWN
