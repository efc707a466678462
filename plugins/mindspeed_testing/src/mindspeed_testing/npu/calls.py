"""One call of a function on fake NPU tensors, forward and backward, and what must hold for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from mindspeed_testing.npu.fake import FakeNpu, device_tensors, fake_npu

Inputs = Callable[[FakeNpu], Sequence[Any]]


@dataclass(frozen=True)
class Call:
    """A call that must work on the NPU.

    Attributes:
        name: as failures call it.
        function: what is called.
        inputs: makes its positional arguments: ``lambda npu: (npu.tensor(4, 8, requires_grad=True),)``.
        options: its other arguments.
        like: a function of the same arguments; the results have its shapes and dtypes. It is given tensors on
            the host.
        operations: operations of the device that must have run, by name: ``("npu_swiglu",
            "npu_swiglu_backward")``.
        backward: whether every tensor that requires grad must get a gradient.
    """

    name: str
    function: Callable[..., Any]
    inputs: Inputs
    options: Mapping[str, Any] = field(default_factory=dict)
    like: Callable[..., Any] | None = None
    operations: tuple[str, ...] = ()
    backward: bool = True


@dataclass(frozen=True)
class CallResult:
    """The record of one call.

    Attributes:
        results: the tensors it returned.
        gradients: those of the inputs that require grad, in order.
        operations: operations of the device that ran, forward and backward.
    """

    results: tuple[torch.Tensor, ...]
    gradients: tuple[torch.Tensor | None, ...]
    operations: Counter[str]


def run_call(call: Call) -> CallResult:
    """Run one call and check it.

    Raises:
        AssertionError: a result is not on the NPU, has another shape or dtype than the reference's, a
        gradient is
            missing or has another shape or dtype than its tensor, or an operation did not run.
    """
    with fake_npu() as npu:
        inputs = tuple(call.inputs(npu))
        expected = _expected(call, inputs)
        results = tuple(device_tensors(call.function(*inputs, **call.options)))
        _check_results(call, results, expected)
        leaves = [tensor for tensor in device_tensors((inputs, call.options)) if tensor.requires_grad]
        gradients = _backward(call, results, leaves)
        for name in call.operations:
            assert npu.count(name), f"{call.name}: {name} did not run, but {_listed(npu.operations)}"
        return CallResult(results, gradients, Counter(npu.operations))


def run_calls(calls: Iterable[Call]) -> dict[str, CallResult]:
    """Run every call; all failures together.

    Raises:
        AssertionError: names each call that failed, and why.
    """
    results: dict[str, CallResult] = {}
    failures: list[str] = []
    for call in calls:
        try:
            results[call.name] = run_call(call)
        except Exception as error:
            failures.append(f"{call.name}: {type(error).__name__}: {error}")
    assert not failures, f"{len(failures)} call(s) failed on the NPU:\n" + "\n".join(failures)
    return results


def _expected(call: Call, inputs: Sequence[Any]) -> tuple[torch.Tensor, ...] | None:
    if call.like is None:
        return None
    with torch.no_grad():
        host = tree_map_only(
            torch.Tensor, lambda t: torch.empty_like(t, device="cpu"), (inputs, dict(call.options))
        )
        return tuple(device_tensors(call.like(*host[0], **host[1])))


def _check_results(
    call: Call, results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor] | None
) -> None:
    for index, result in enumerate(results):
        assert result.device.type == "npu", f"{call.name}: result {index} is on {result.device}"
    if expected is None:
        return
    got, wanted = [_shape(t) for t in results], [_shape(t) for t in expected]
    assert got == wanted, (
        f"{call.name}: results are {', '.join(got)}; the reference's are {', '.join(wanted)}"
    )


def _backward(
    call: Call, results: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    if not (call.backward and leaves):
        return ()
    roots = [tensor for tensor in results if tensor.requires_grad]
    assert roots, f"{call.name}: no result requires grad, although {len(leaves)} input(s) do"
    gradients = torch.autograd.grad(
        roots, leaves, [torch.empty_like(root) for root in roots], allow_unused=True
    )
    for leaf, gradient in zip(leaves, gradients):
        assert gradient is not None, f"{call.name}: the input {_shape(leaf)} gets no gradient"
        assert _shape(gradient) == _shape(leaf), (
            f"{call.name}: the gradient of the input {_shape(leaf)} is {_shape(gradient)}"
        )
        assert gradient.device.type == "npu", f"{call.name}: a gradient is on {gradient.device}"
    return tuple(gradients)


def _shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _listed(operations: Mapping[str, int]) -> str:
    return (
        ", ".join(f"{name} x{times}" for name, times in sorted(operations.items())) or "nothing of the device"
    )
