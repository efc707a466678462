"""A device with numbers: real tensors of torch_npu in the host's memory, computed as contracts say.

torch_npu allocates, makes views and runs its autograd formulas itself, on the stand-in runtime with memory.
What would start a kernel is computed here instead. Operations of PyTorch run on the host, on the very memory
of their tensors; communication goes through the host's backend; an operation of the device's own namespaces
runs its `mindspeed_testing.npu.kernels.contract.Kernel`, and without one it raises. Memory that nobody wrote
is NaN, or the largest integer.
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from mindspeed_testing.npu.fake import DEVICE_NAMESPACES, DISPATCHED, count_runs
from mindspeed_testing.npu.generator import HostRandom, draws, generator_of
from mindspeed_testing.npu.host_formulas import FORMULAS, recording_gradients
from mindspeed_testing.npu.kernels import all_kernels
from mindspeed_testing.npu.kernels.contract import Arguments, Kernel, unwritten
from mindspeed_testing.npu.shape_rules import bound_arguments
from mindspeed_testing.npu.soc import announced_soc, announcing
from mindspeed_testing.npu.stubs import MEMORY, check_stubbed

_UNINITIALISED = frozenset(
    f"aten::{name}"
    for name in (
        *("empty.memory_format", "empty_strided", "empty_like", "new_empty", "new_empty_strided"),
        *("empty_permuted", "resize_"),
    )
)
"""Operations that hand out memory as they find it."""

_OF_STORAGE = frozenset(
    f"aten::{name}"
    for name in (
        *("set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor", "set_"),
        *("detach", "alias", "_reshape_alias", "_unsafe_view", "lift_fresh", "record_stream", "is_pinned"),
        *("_pin_memory", "set_data", "is_same_size", "resize_as_"),
    )
)
"""Operations that look at no element; like views, torch_npu runs them itself."""

_FACTS = frozenset({"npu::get_npu_format", "npu::get_storage_size"})
"""Operations of torch_npu that only look at a tensor's description."""

_TAKES_HOST_TENSORS = ("copy", "to_copy", "index", "_index_put", "_unsafe_index", "_to_copy", "set_")
"""Beginnings of the operations of PyTorch whose arguments may be on both sides."""


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
        if func.namespace in DEVICE_NAMESPACES and func.name() not in (*_FACTS, *FORMULAS):
            self.operations[str(func)] += 1
            DISPATCHED[str(func)] += 1
            return self._run_kernel(func, args, kwargs)
        if func.namespace == "c10d":
            self.operations[str(func)] += 1
        if not any(is_on_device(value) for value in tree_iter((args, kwargs))):
            return func(*args, **kwargs)
        name = func.name()
        if name in _UNINITIALISED:
            return _fill(func, args, kwargs)
        if name in _OF_STORAGE or name in _FACTS or func.is_view:
            return func(*args, **kwargs)
        _check_one_device(func, args, kwargs)
        if func.namespace == "aten" and not _has_kernel(name):
            self.without_kernel[name] += 1
        if draws(func):
            generator = generator_of((args, kwargs))
            return on_host(
                func, args, kwargs, lambda *a, **k: self._random.draw(generator, lambda: func(*a, **k))
            )
        return on_host(func, args, kwargs, FORMULAS.get(name, func))

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
        resize = _resized(torch.UntypedStorage.resize_)
        stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resize))
        # Printing runs its operations outside of every mode.
        stack.enter_context(mock.patch.object(torch._tensor_str, "_str", _printed(torch._tensor_str._str)))
        stack.enter_context(device)
        yield device


def running_test() -> str:
    """Return the test that pytest runs, file and function; empty outside of tests."""
    return os.environ.get("PYTEST_CURRENT_TEST", "").partition("[")[0].partition(" ")[0]


def is_on_device(value: Any) -> bool:
    """Return whether a value is a tensor, device or generator of the NPU."""
    if isinstance(value, Tensor):
        return value.device.type == "npu"
    if isinstance(value, torch.device):
        return value.type == "npu"
    return isinstance(value, torch.Generator) and value.device.type == "npu"


def host_alias(tensor: Tensor) -> Tensor:
    """Return a tensor on the host over the same memory, which it keeps alive."""
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if not size:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    block = (ctypes.c_char * size).from_address(storage.data_ptr())
    block.owner = storage  # type: ignore[attr-defined]
    memory = torch.frombuffer(block, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(
        memory, tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def to_device(tensor: Tensor) -> Tensor:
    """Return a new tensor of the NPU with the values and strides of one on the host."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="npu")
    host_alias(made).copy_(tensor)
    return made


def on_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
    """Run an operation on the memory of its tensors; what it returns is on the device.

    Args:
        func: the operation, whose schema says what is written.
        args: its arguments by position, on the device.
        kwargs: those by name.
        run: computes it on the host.
    """
    aliases: dict[int, tuple[Tensor, Tensor]] = {}
    wanted = bound_arguments(func, args, kwargs).get("device")
    stays = isinstance(wanted, torch.device) and wanted.type != "npu"

    def lower(value: Any) -> Any:
        if isinstance(value, Tensor) and value.device.type == "npu":
            if id(value) not in aliases:
                aliases[id(value)] = (value, host_alias(value))
            return aliases[id(value)][1]
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if isinstance(value, torch.Generator):
            return None if value.device.type == "npu" else value
        return value

    host_args, host_kwargs = tree_map_only((Tensor, torch.device, torch.Generator), lower, (args, kwargs))
    if host_kwargs.get("pin_memory"):
        host_kwargs = {**host_kwargs, "pin_memory": False}
    result = run(*host_args, **host_kwargs)
    for original, alias in aliases.values():
        if alias.shape != original.shape:
            original.resize_(alias.shape)
            host_alias(original).copy_(alias)
    known = {id(alias): original for original, alias in aliases.values()}

    def lift(tensor: Tensor) -> Tensor:
        if id(tensor) in known:
            return known[id(tensor)]
        if stays or tensor.device.type != "cpu":
            return tensor
        return to_device(tensor)

    return tree_map_only(Tensor, lift, result)


def _resized(original: Callable[..., Any]) -> Callable[..., Any]:
    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        before = storage.nbytes()
        result = original(storage, size)
        if storage.device.type == "npu" and size > before:
            # Every floating dtype reads these bytes as NaN.
            ctypes.memset(storage.data_ptr() + before, 0xFF, size - before)
        return result

    return resize


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


@cache
def _has_kernel(operation: str) -> bool:
    found = torch._C._dispatch_has_kernel_for_dispatch_key
    keys = ("PrivateUse1", "CompositeImplicitAutograd", "CompositeExplicitAutograd")
    return any(found(operation, key) for key in keys)


def _check_one_device(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if func.namespace != "aten" or func.name().removeprefix("aten::").startswith(_TAKES_HOST_TENSORS):
        return
    for value in tree_iter((args, kwargs)):
        if isinstance(value, Tensor) and value.device.type == "cpu" and value.dim():
            raise RuntimeError(
                f"{func.name()}: expected all tensors to be on the same device, found npu and cpu"
            )
