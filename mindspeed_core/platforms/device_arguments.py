"""Wrappers that send ``device="cuda"`` to the processor, for code that names the device in its source.

Each function takes the original and returns its replacement; the original is reached through that argument
only, so that a scan for holders never finds it here. Types such as ``torch.device`` are left alone.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

_CPU = torch.device("cpu")
Function = Callable[..., Any]


def host_device(device: Any) -> Any:
    """The device to use: cuda in any spelling (text, index, ``torch.device``) becomes the processor."""
    if isinstance(device, torch.device):
        return _CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return _CPU if device.startswith("cuda") else device
    if isinstance(device, int) and not isinstance(device, bool):
        return _CPU
    return device


def factory(original: Function) -> Function:
    """A tensor factory: ``device`` is rewritten, ``pin_memory`` dropped (there is nothing to pin for)."""

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if "device" in kwargs:
                kwargs["device"] = host_device(kwargs["device"])
            kwargs.pop("pin_memory", None)
        return original(*args, **kwargs)

    return make


def tensor_to(original: Function) -> Function:
    """``Tensor.to`` with the device as first argument or by name."""

    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], (torch.device, str, int)):
            args = (host_device(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = host_device(kwargs["device"])
        return original(self, *args, **kwargs)

    return to


def tensor_type(original: Function) -> Function:
    """``Tensor.type``: megatron compares the answer with cuda type names; everybody else hears the truth."""

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
    """``torch.load`` with ``map_location`` naming cuda."""

    @functools.wraps(original)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(map_location, int):
            map_location = host_device(map_location)
        return original(f, map_location, *args, **kwargs)

    return load


def device_context(original: Function) -> Function:
    """``with torch.device("cuda")`` and ``torch.set_default_device("cuda")``."""

    @functools.wraps(original)
    def __init__(self: Any, device: Any) -> None:
        original(self, host_device(device))

    return __init__


def autocast_init(original: Function) -> Function:
    """``torch.autocast("cuda", …)``, which a processor build silently disables."""

    @functools.wraps(original)
    def __init__(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        original(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    return __init__


def mesh_of_group(original: Function) -> Function:
    """``DeviceMesh.from_group(group, "cuda")``: the mesh of fully sharded parameters."""

    @functools.wraps(original)
    def from_group(group: Any, device_type: str, *args: Any, **kwargs: Any) -> Any:
        return original(group, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    return from_group


def autocast_query(original: Function) -> Function:
    """``torch.is_autocast_enabled("cuda")``, ``torch.get_autocast_dtype("cuda")``: what cpu autocast says."""

    @functools.wraps(original)
    def query(*args: Any) -> Any:
        return original(*("cpu" if argument == "cuda" else argument for argument in args))

    return query


def frequencies_on_host(original: Function) -> Function:
    """A rotary embedding's constructor: frequencies are computed where the model is, on the processor."""

    @functools.wraps(original)
    def constructor(self: Any, *args: Any, **options: Any) -> None:
        options["use_cpu_initialization"] = True
        original(self, *args, **options)

    return constructor


def split_sizes_on_host(original: Function) -> Function:
    """``maybe_move_tensor_to_cpu``: split sizes already on the host still become numpy where asked for."""

    @functools.wraps(original)
    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor) and tensor.device.type == "cpu":
            return tensor.numpy()
        return original(tensor, as_numpy=as_numpy, record_stream=record_stream)

    return maybe_move_tensor_to_cpu
