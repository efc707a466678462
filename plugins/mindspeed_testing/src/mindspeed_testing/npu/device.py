"""A device with numbers: real tensors of torch_npu in the host's memory, computed as contracts say.

torch_npu allocates, makes views and runs its autograd formulas itself, on the stand-in runtime with memory.
What would start a kernel is computed here instead. Operations of PyTorch run on the host, on the very memory
of their tensors; communication goes through the host's backend; an operation of the device's own namespaces
runs its `mindspeed_testing.npu.kernels.contract.Kernel`, and without one it raises. Memory that nobody wrote
is NaN, or the largest integer.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_testing.npu.device_memory import host_alias, is_on_device, leaves, on_host, resized
from mindspeed_testing.npu.fake import DISPATCHED, count_runs
from mindspeed_testing.npu.generator import HostRandom, generator_of
from mindspeed_testing.npu.host_formulas import recording_gradients
from mindspeed_testing.npu.kernels import all_kernels
from mindspeed_testing.npu.kernels.contract import Arguments, Kernel, unwritten
from mindspeed_testing.npu.operation_kinds import OperationKind, kind_of
from mindspeed_testing.npu.shape_rules import bound_arguments
from mindspeed_testing.npu.soc import announced_soc, announcing
from mindspeed_testing.npu.stubs import MEMORY, check_stubbed

COMPUTED: dict[str, str] = {}
"""The first test of this process that each kernel computed a call for, by operation."""


class ValueDevice(TorchDispatchMode):
    """The state inside `value_device`.

    Attributes:
        soc: the generation of the device, one of `mindspeed_testing.npu.kernels.contract.SOCS`.
        operations: how often each operation of the device and of torch.distributed ran.
        without_kernel: how often each operation of PyTorch ran that torch_npu has no kernel of: a device
            copies its tensors to the host and back for it.
    """

    def __init__(self, kernels: Mapping[str, Kernel], soc: str) -> None:
        """Start with nothing counted."""
        super().__init__()
        self.soc = soc
        self.operations: Counter[str] = Counter()
        self.without_kernel: Counter[str] = Counter()
        self._kernels = kernels
        self._random = HostRandom()

    def count(self, operation: str) -> int:
        """Count the runs of an operation, by name without namespace and overload: ``npu_swiglu``."""
        return count_runs(self.operations, operation)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation; see the module."""
        kwargs = kwargs or {}
        kind = kind_of(func)
        if kind.is_own:
            self.operations[str(func)] += 1
            DISPATCHED[str(func)] += 1
            return self._run_kernel(func, args, kwargs)
        if kind.is_collective:
            self.operations[str(func)] += 1
        given = leaves((args, *kwargs.values()) if kwargs else args)
        if not any(map(is_on_device, given)):
            return func(*args, **kwargs)
        if kind.allocates:
            return _fill(func, args, kwargs)
        if kind.keeps_values:
            return func(*args, **kwargs)
        _check_one_device(kind, given)
        if kind.without_kernel:
            self.without_kernel[kind.name] += 1
        if kind.draws:
            generator = generator_of((args, kwargs))
            return on_host(
                func, args, kwargs, lambda *a, **k: self._random.draw(generator, lambda: func(*a, **k))
            )
        return on_host(func, args, kwargs, kind.formula or func)

    def _run_kernel(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kernel = self._kernels.get(func.name())
        if kernel is None:
            raise RuntimeError(
                f"{func.name()} has no kernel on the value device: add a contract to "
                "mindspeed_testing.npu.kernels, or give value_device(kernels=...) one"
            )

        given = bound_arguments(func, args, kwargs).items()
        requiring = [name for name, value in given if isinstance(value, Tensor) and value.requires_grad]

        def run(*host_args: Any, **host_kwargs: Any) -> Any:
            values = bound_arguments(func, host_args, host_kwargs)
            # Kernels may differentiate a formula of theirs; below autograd that is switched off.
            with recording_gradients(), torch.no_grad():
                result = kernel.run(Arguments(values, self.soc, requiring))
            COMPUTED.setdefault(kernel.operation, running_test())
            return result

        return on_host(func, args, kwargs, run)


@contextmanager
def value_device(
    *, soc: str | None = None, kernels: Mapping[str, Kernel] | None = None
) -> Iterator[ValueDevice]:
    """Make tensors on ``npu`` carry values inside the context.

    Backward runs on the calling thread, because what runs operations is a property of the thread.

    Args:
        soc: the generation of the device; by default the one that the process was started with.
        kernels: further kernels, by operation, or others in the place of the package's own.

    Raises:
        UserError: the process was not started with the stand-in libraries.
    """
    check_stubbed()
    import torch_npu  # noqa: F401

    device = ValueDevice({**all_kernels(), **(kernels or {})}, soc or announced_soc())
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {MEMORY: "1"}))
        # Segments that grow are addresses without memory, which the stand-in libraries do not serve.
        torch.npu.memory._set_allocator_settings("expandable_segments:False")  # type: ignore[attr-defined]
        stack.callback(torch.npu.empty_cache)  # type: ignore[attr-defined]
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        if soc is not None:
            stack.enter_context(announcing(soc))
        resize = resized(torch.UntypedStorage.resize_)
        stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resize))
        # Printing runs its operations outside of every mode.
        stack.enter_context(mock.patch.object(torch._tensor_str, "_str", _printed(torch._tensor_str._str)))
        stack.enter_context(device)
        yield device


def running_test() -> str:
    """Return the test that pytest runs, file and function; empty outside of tests."""
    return os.environ.get("PYTEST_CURRENT_TEST", "").partition("[")[0].partition(" ")[0]


def _printed(original: Callable[..., str]) -> Callable[..., str]:
    def text_of(tensor: Tensor, *, tensor_contents: Any = None) -> str:
        if not is_on_device(tensor):
            return original(tensor, tensor_contents=tensor_contents)
        return f"npu:{original(host_alias(tensor.detach()))}"

    return text_of


def _fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    before = args[0].untyped_storage().nbytes() if func.name() == "aten::resize_" else 0
    made = func(*args, **kwargs)
    if made.device.type == "npu" and made.untyped_storage().nbytes() > before:
        whole = host_alias(made)
        first = -(-before // made.element_size())
        count = made.untyped_storage().nbytes() // made.element_size() - first
        whole.as_strided((count,), (1,), first).copy_(unwritten((1,), made.dtype))
    return made


def _check_one_device(kind: OperationKind, values: Iterable[Any]) -> None:
    if not kind.one_device:
        return
    for value in values:
        if isinstance(value, Tensor) and value.device.type == "cpu" and value.dim():
            raise RuntimeError(
                f"{kind.name}: expected all tensors to be on the same device, found npu and cpu"
            )
