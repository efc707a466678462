"""Wrappers that send ``device="cuda"`` to CPU, for code that names the device in its source.

Each function takes the original and returns its replacement; the original is reached through that argument
only, so that a scan for holders never finds it here. Types such as ``torch.device`` are left alone.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

_CPU = torch.device("cpu")
Function = Callable[..., Any]


def host_device(device: Any) -> Any:
    """Return the device to use: cuda in any spelling (text, index, ``torch.device``) becomes the CPU."""
    if isinstance(device, torch.device):
        return _CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return _CPU if device.startswith("cuda") else device
    if isinstance(device, int) and not isinstance(device, bool):
        return _CPU
    return device


def factory(original: Function) -> Function:
    """Wrap a tensor factory: rewrite ``device``, drop ``pin_memory`` (there is nothing to pin for)."""

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if "device" in kwargs:
                kwargs["device"] = host_device(kwargs["device"])
            kwargs.pop("pin_memory", None)
        return original(*args, **kwargs)

    return make


def tensor_to(original: Function) -> Function:
    """Wrap ``Tensor.to``; the device is the first argument or given by name."""

    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], (torch.device, str, int)):
            args = (host_device(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = host_device(kwargs["device"])
        return original(self, *args, **kwargs)

    return to


def tensor_type(original: Function) -> Function:
    """Wrap ``Tensor.type``: megatron-core gets the cuda type names it compares with, all others the real."""

    @functools.wraps(original)
    def type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            name: str = original(self)
            if not name.startswith("torch.cuda."):
                caller = sys._getframe(1).f_globals.get("__name__", "")
                if caller.startswith("megatron."):
                    return "torch.cuda." + name.rpartition(".")[2]
            return name
        if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return original(self, dtype, *args, **kwargs)

    return type


def load(original: Function) -> Function:
    """Wrap ``torch.load`` with a ``map_location`` that names cuda."""

    @functools.wraps(original)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(map_location, int):
            map_location = host_device(map_location)
        return original(f, map_location, *args, **kwargs)

    return load


def device_context(original: Function) -> Function:
    """Wrap ``with torch.device("cuda")`` and ``torch.set_default_device("cuda")``."""

    @functools.wraps(original)
    def __init__(self: Any, device: Any) -> None:
        original(self, host_device(device))

    return __init__


def autocast_init(original: Function) -> Function:
    """Wrap ``torch.autocast("cuda", …)``, which a CPU build of torch silently disables."""

    @functools.wraps(original)
    def __init__(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        original(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    return __init__


def mesh_of_group(original: Function) -> Function:
    """Wrap ``DeviceMesh.from_group(group, "cuda")``, the mesh of fully sharded parameters."""

    @functools.wraps(original)
    def from_group(group: Any, device_type: str, *args: Any, **kwargs: Any) -> Any:
        return original(group, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    return from_group


def autocast_query(original: Function) -> Function:
    """Wrap ``torch.is_autocast_enabled`` and ``torch.get_autocast_dtype`` to ask about CPU autocast."""

    @functools.wraps(original)
    def query(*args: Any) -> Any:
        return original(*("cpu" if argument == "cuda" else argument for argument in args))

    return query


def frequencies_on_host(original: Function) -> Function:
    """Wrap a rotary embedding's constructor: frequencies are computed where the model is, on CPU."""

    @functools.wraps(original)
    def constructor(self: Any, *args: Any, **options: Any) -> None:
        options["use_cpu_initialization"] = True
        original(self, *args, **options)

    return constructor


def split_sizes_on_host(original: Function) -> Function:
    """Wrap ``maybe_move_tensor_to_cpu``: split sizes on the host still become numpy where asked for."""

    @functools.wraps(original)
    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor) and tensor.device.type == "cpu":
            return tensor.numpy()
        return original(tensor, as_numpy=as_numpy, record_stream=record_stream)

    return maybe_move_tensor_to_cpu


def gather_along_first_dim(original: Function) -> Function:
    """Wrap ``_gather_along_first_dim``: pad different lengths for gloo and cut them again."""

    @functools.wraps(original)
    def gather(
        input_: torch.Tensor,
        group: dist.ProcessGroup,
        output_split_sizes: Sequence[int] | None = None,
        *rest: Any,
        **options: Any,
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1 or len(set(output_split_sizes)) == 1:
            return original(input_, group, output_split_sizes, *rest, **options)
        longest = max(output_split_sizes)
        padded = input_.new_zeros(longest, *input_.shape[1:])
        padded[: input_.shape[0]] = input_
        parts = [torch.empty_like(padded) for _ in output_split_sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:length] for part, length in zip(parts, output_split_sizes)])

    return gather
