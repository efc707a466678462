"""Comparison of a backend with its operator's reference, for our own and for other packages' tests.

from mindspeed_kernels.conformance import check_backend

def test_acme_rms_norm():
    check_backend("rms_norm", "acme")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed_kernels.ops.backend import Backend
from mindspeed_kernels.ops.operator import OPERATORS, REFERENCE, Operator, Sample

_TOLERANCE = {
    torch.float64: (1e-7, 1e-7),
    torch.float32: (1e-4, 1e-5),
    torch.bfloat16: (3e-2, 3e-2),
    torch.float16: (5e-3, 5e-3),
}


@dataclass(frozen=True)
class Outcome:
    """Results and effects of a call of an operator.

    Attributes:
        results: the tensors it returned.
        arguments: the tensor arguments afterwards, in order.
        gradients: of each argument that was followed by autograd, None where it got none.
    """

    results: tuple[Tensor, ...]
    arguments: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...]


def samples_of(
    operator: Operator[..., Any], device: str = "cpu", dtype: torch.dtype = torch.float32
) -> list[Sample]:
    """Return the operator's example calls with random tensors of one floating dtype."""
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        if not dtype.is_floating_point:
            return torch.zeros(shape, dtype=dtype, device=device)
        return torch.randn(shape, generator=generator).to(device, dtype)

    return [] if operator.samples is None else list(operator.samples(make))


def check_backend(
    operator: str, backend: str, *, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> int:
    """Compare a backend with the reference on the operator's samples.

    Results, arguments changed in place and gradients must agree, and every gradient that the reference has
    must be there.

    Args:
        operator: its name.
        backend: its name.
        device: type of device to run on.
        dtype: dtype of the samples' floating tensors.

    Returns:
        How many samples the backend serves.

    Raises:
        AssertionError: it differs.
    """
    found = OPERATORS[operator]
    chosen = found.backends[backend]
    served = 0
    for sample in samples_of(found, device, dtype):
        if chosen.refusal(found.call_of(*sample.args, **sample.options)):
            continue
        served += 1
        _compare(found, chosen, sample, dtype)
    return served


def _compare(operator: Operator[..., Any], backend: Backend, sample: Sample, dtype: torch.dtype) -> None:
    expected = outcome(operator.backends[REFERENCE].function, sample, operator.comparable)
    sample = sample if backend.differentiable else Sample(sample.args, sample.options, backward=False)
    got = outcome(backend.function, sample, operator.comparable)
    rtol, atol = _TOLERANCE[dtype]
    where = f"{operator.name}[{backend.name}] {describe(sample)}"

    def message(text: str) -> str:
        return f"{where}: {text}"

    assert len(got.results) == len(expected.results), f"{where}: another number of results"
    for actual, other in zip(got.results + got.arguments, expected.results + expected.arguments):
        torch.testing.assert_close(actual, other, rtol=rtol, atol=atol, msg=message)
    if not sample.backward:
        return
    for mine_, other_ in zip(got.gradients, expected.gradients):
        if other_ is None:
            continue
        assert mine_ is not None, f"{where}: a gradient is None that the reference has"
        torch.testing.assert_close(mine_, other_, rtol=10 * rtol, atol=10 * atol, msg=message)


def outcome(
    function: Callable[..., Any], sample: Sample, comparable: Callable[[Any], Any] | None = None
) -> Outcome:
    """Call an implementation with copies of a sample's tensors, and run backward where the sample says so.

    What ``comparable`` returns of the result counts; by default everything does.
    """
    followed: list[Tensor] = []
    seen: list[Tensor] = []

    def copied(value: Any) -> Any:
        if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
            return type(value)(copied(item) for item in value)
        if not isinstance(value, Tensor):
            return value
        copy = value.detach().clone()
        if sample.backward and copy.is_floating_point():
            copy.requires_grad_()
            followed.append(copy)
        seen.append(copy)
        return copy

    args = tuple(copied(value) for value in sample.args)
    options = {name: copied(value) for name, value in sample.options.items()}
    result = function(*args, **options)
    result = result if comparable is None else comparable(result)
    results = tuple(item for item in _flat(result) if isinstance(item, Tensor))
    if sample.backward:
        _backward(results)
    return Outcome(
        tuple(item.detach() for item in results),
        tuple(item.detach() for item in seen),
        tuple(item.grad for item in followed),
    )


def _backward(results: Sequence[Tensor]) -> None:
    generator = torch.Generator().manual_seed(1)
    total: Tensor | None = None
    for item in results:
        if item.requires_grad:
            weight = torch.randn(item.shape, generator=generator).to(item)
            total = (item * weight).sum() if total is None else total + (item * weight).sum()
    if total is not None:
        total.backward()


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [item for part in value for item in _flat(part)]
    return [value]


def describe(sample: Sample) -> str:
    """Return the shapes and options of a sample."""
    shown = [_shown(value) for value in sample.args]
    shown += [f"{name}={_shown(value)}" for name, value in sorted(sample.options.items())]
    return f"({', '.join(shown)})"


def _shown(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else repr(value)
