"""Tensors on an NPU that have shapes and no values; torch_npu's own schemas and formulas run on them.

`fake_npu` is `torch`'s fake-tensor mode with three differences. A device is present, so that code which looks
for one finds it, but nothing is ever allocated there. Numbers that code reads from a tensor (``item()``) have
a fixed answer, because whole models cannot be run otherwise; only a single number
that was made on the host is still known. And every operation of the device's namespaces is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_testing.npu.errata import SHAPES
from mindspeed_testing.npu.stubs import check_stubbed

DEVICE_NAMESPACES = ("npu", "atb")
DISPATCHED: Counter[str] = Counter()
"""Every operation of the device's namespaces that ran under `fake_npu` in this process, with overload."""

_READ = torch.ops.aten._local_scalar_dense.default
_COALESCED = frozenset(
    f"c10d::{name}"
    for name in (
        "allreduce_coalesced_",
        "allgather_coalesced_",
        "allgather_into_tensor_coalesced_",
        "reduce_scatter_tensor_coalesced_",
    )
)


class _NoDeviceStart(FakeTensorMode):
    """Fake tensors on a device that is announced and must not be started."""

    @property
    def avoid_device_init(self) -> bool:
        """Return whether constants stay on the host until they are fake."""
        return True


class FakeNpu(TorchDispatchMode):
    """The state inside `fake_npu`.

    Attributes:
        operations: how often each operation of the device and of torch.distributed ran:
            ``npu.npu_swiglu.default``.
    """

    def __init__(self, shapes: Mapping[str, Callable[..., Any]]) -> None:
        """Start with nothing counted; ``shapes`` stands in for shape functions of torch_npu."""
        super().__init__()
        self.operations: Counter[str] = Counter()
        self._shapes = shapes

    def tensor(
        self, *shape: int, dtype: torch.dtype = torch.bfloat16, requires_grad: bool = False
    ) -> torch.Tensor:
        """Make a tensor of this shape on the NPU; floating tensors can require grad."""
        return torch.empty(shape, dtype=dtype, device="npu", requires_grad=requires_grad)

    def count(self, operation: str) -> int:
        """Count the runs of an operation, by name without namespace and overload: ``npu_swiglu``."""
        return count_runs(self.operations, operation)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count, and answer what has no shape function."""
        if func.namespace in (*DEVICE_NAMESPACES, "c10d"):
            self.operations[str(func)] += 1
            if func.namespace in DEVICE_NAMESPACES:
                DISPATCHED[str(func)] += 1
        if func is _READ and getattr(args[0], "constant", None) is None:
            return _number(args[0].dtype)
        if func.name() in _COALESCED:
            from torch.distributed._meta_registrations import create_fakework

            return create_fakework(args, return_first_arg=False)
        shapes = self._shapes.get(str(func))
        if shapes is not None:
            return shapes(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def count_runs(operations: Mapping[str, int], operation: str) -> int:
    """Count the runs of an operation, by name without namespace and overload: ``npu_swiglu``."""
    return sum(times for name, times in operations.items() if name.split(".")[1] == operation)


def _number(dtype: torch.dtype) -> Any:
    # False for switches: whether a value is NaN or a state has changed is what programs ask for most.
    if dtype == torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 1


@contextmanager
def fake_npu(shapes: Mapping[str, Callable[..., Any]] = SHAPES) -> Iterator[FakeNpu]:
    """Make tensors on ``npu`` inside the context without a device; see the module.

    Backward runs on the calling thread, so that what observes a thread sees it too. A tensor made inside
    means nothing outside.

    Args:
        shapes: shape functions by operation with overload, in the place of torch_npu's own: by default those
            that are known to be missing or wrong.

    Raises:
        UserError: the process was not started with the stand-in libraries.
    """
    check_stubbed()
    import torch_npu  # noqa: F401

    mode = _NoDeviceStart(allow_non_fake_inputs=True)
    counting = FakeNpu(shapes)
    with ExitStack() as stack:
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(mock.patch.object(torch.utils, "swap_tensors", _swapping(mode)))
        stack.enter_context(mode)
        stack.enter_context(counting)
        yield counting


def _swapping(mode: FakeTensorMode) -> Any:
    """Stand in for ``torch.utils.swap_tensors``, by which a module of fake parameters moves to a device.

    It refuses tensors with weak references, and the mode itself holds some, to recognise what it has seen.
    And it swaps attributes too, where a parameter that moves to a real device keeps those that it was given.
    """
    original = torch.utils.swap_tensors

    def swap_tensors(first: torch.Tensor, second: torch.Tensor) -> None:
        mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
        given = dict(first.__dict__)
        original(first, second)
        for name in given.keys() - first.__dict__.keys():
            first.__dict__[name] = given[name]

    return swap_tensors


def device_tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors of a structure, in order."""
    from torch.utils._pytree import tree_iter

    return [value for value in tree_iter(values) if isinstance(value, torch.Tensor)]


def unlimited_memory(platform: Any) -> int:
    """Stand in for ``Platform.total_memory``: what has shapes alone fits anywhere."""
    return 1 << 50
