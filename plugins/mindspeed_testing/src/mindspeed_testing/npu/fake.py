"""Tensors on an NPU that have shapes and no values; torch_npu's own schemas and formulas run on them.

`fake_npu` is the mode of the platform ``fake-npu`` without a session. A device is present, so that code
which looks for one finds it, but nothing is ever allocated there. Numbers that code reads from a tensor
(``item()``) have a fixed answer where they are floating-point numbers or switches; an integer is refused
unless it is known. Every operation of the device's namespaces is counted, and held to the rules of its
contract that need no numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mindspeed_core.runtime.patches import PatchLedger
from mindspeed_megatron.fake.npu_shapes import SHAPES
from mindspeed_megatron.fake.tensors import AnsweringMode, ShapesOnly, shapes_only, swap_patch
from mindspeed_testing.npu.shape_rules import ShapeRules
from mindspeed_testing.npu.stubs import check_stubbed

DEVICE_NAMESPACES = ("npu", "atb")
DISPATCHED: Counter[str] = Counter()
"""Every operation of the device's namespaces that ran under `fake_npu` in this process, with overload."""


class FakeNpu(AnsweringMode):
    """The state inside `fake_npu`.

    Attributes:
        operations: how often each operation of the device and of torch.distributed ran:
            ``npu.npu_swiglu.default``.
    """

    def __init__(self, shapes: Mapping[str, Callable[..., Any]], *, rules: bool = True) -> None:
        """Start with nothing counted.

        Args:
            shapes: stand in for shape functions of torch_npu.
            rules: whether a call that breaks a rule of its contract is refused.
        """
        super().__init__(shapes)
        self.operations: Counter[str] = Counter()
        self._rules = ShapeRules() if rules else None

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
        """Count, check, and answer what has no shape function."""
        if func.namespace in (*DEVICE_NAMESPACES, "c10d"):
            self.operations[str(func)] += 1
            if func.namespace in DEVICE_NAMESPACES:
                DISPATCHED[str(func)] += 1
                if self._rules is not None:
                    self._rules.check(func, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)


def count_runs(operations: Mapping[str, int], operation: str) -> int:
    """Count the runs of an operation, by name without namespace and overload: ``npu_swiglu``."""
    return sum(times for name, times in operations.items() if name.split(".")[1] == operation)


@contextmanager
def fake_npu(shapes: Mapping[str, Callable[..., Any]] = SHAPES, *, rules: bool = True) -> Iterator[FakeNpu]:
    """Make tensors on ``npu`` inside the context without a device; see the module.

    Backward runs on the calling thread, so that what observes a thread sees it too. A tensor made inside
    means nothing outside.

    Args:
        shapes: shape functions by operation with overload, in the place of torch_npu's own: by default those
            that are known to be missing or wrong.
        rules: whether a call that breaks a rule of its contract raises a
            `mindspeed_testing.npu.kernels.contract.KernelRefusal`, as far as it shows in shapes, dtypes,
            strides and options; False leaves the call to torch_npu's shape function alone.

    Raises:
        UserError: the process was not started with the stand-in libraries.
    """
    check_stubbed()
    import torch_npu  # noqa: F401

    mode, counting, ledger = ShapesOnly(), FakeNpu(shapes, rules=rules), PatchLedger()
    ledger.apply([swap_patch(mode)], owner="fake NPU")
    try:
        with shapes_only(mode, counting):
            yield counting
    finally:
        ledger.revert()


def device_tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors of a structure, in order."""
    from torch.utils._pytree import tree_iter

    return [value for value in tree_iter(values) if isinstance(value, torch.Tensor)]
