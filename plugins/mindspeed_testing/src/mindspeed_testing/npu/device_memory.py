"""Tensors of the value device as tensors of the host over the same memory.

Every operation of a training passes here, so that most of the time of a training on a value device is spent
here: arguments are walked by hand, and memory is described through torch's own functions, which
``transfer_to_npu`` does not wrap.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map

from mindspeed_testing.npu.operation_kinds import kind_of

_HOST = torch.device("cpu")
_PLAIN = (Tensor, torch.device, torch.Generator)
_empty = torch._C._VariableFunctions.empty
_empty_strided = torch._C._VariableFunctions.empty_strided
_frombuffer = torch._C._VariableFunctions.frombuffer


def leaves(values: Iterable[Any], tensors: list[Any] | None = None) -> list[Any]:
    """Return the values inside of nested arguments or results."""
    tensors = [] if tensors is None else tensors
    for value in values:
        kind = type(value)
        if kind is list or kind is tuple:
            leaves(value, tensors)
        elif isinstance(value, (list, tuple, dict)):
            tensors.extend(tree_iter(value))
        else:
            tensors.append(value)
    return tensors


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Return nested values with each one changed."""
    kind = type(value)
    if kind is tuple:
        return tuple([mapped(change, one) for one in value])
    if kind is list:
        return [mapped(change, one) for one in value]
    if isinstance(value, (list, tuple, dict)):
        return tree_map(change, value)
    return change(value)


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
        return _empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    block = (ctypes.c_char * size).from_address(storage.data_ptr())
    block.owner = storage  # type: ignore[attr-defined]
    memory = _frombuffer(block, dtype=torch.uint8).untyped_storage()
    return _empty((0,), dtype=tensor.dtype).set_(
        memory, tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def to_device(tensor: Tensor) -> Tensor:
    """Return a new tensor of the NPU with the values and strides of one on the host."""
    made: Tensor = _empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="npu")
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
    wanted = kind_of(func).wanted_device(args, kwargs)
    stays = isinstance(wanted, torch.device) and wanted.type != "npu"

    def lower(value: Any) -> Any:
        if not isinstance(value, _PLAIN):
            return value
        if isinstance(value, Tensor):
            if value.device.type != "npu":
                return value
            if id(value) not in aliases:
                aliases[id(value)] = (value, host_alias(value))
            return aliases[id(value)][1]
        if isinstance(value, torch.device):
            return _HOST
        return None if value.device.type == "npu" else value

    host_args = [mapped(lower, value) for value in args]
    host_kwargs = {name: mapped(lower, value) for name, value in kwargs.items()}
    if host_kwargs.get("pin_memory"):
        host_kwargs["pin_memory"] = False
    result = run(*host_args, **host_kwargs)
    for original, alias in aliases.values():
        if alias.shape != original.shape:
            original.resize_(alias.shape)
            host_alias(original).copy_(alias)
    known = {id(alias): original for original, alias in aliases.values()}

    def lift(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in known:
            return known[id(value)]
        return value if stays or value.device.type != "cpu" else to_device(value)

    return mapped(lift, result)


def resized(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``UntypedStorage.resize_`` with memory that nobody wrote read as NaN."""

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        before = storage.nbytes()
        result = original(storage, size)
        if storage.device.type == "npu" and size > before:
            # Every floating dtype reads these bytes as NaN.
            ctypes.memset(storage.data_ptr() + before, 0xFF, size - before)
        return result

    return resize
