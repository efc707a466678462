"""Reasons why a backend cannot run in this process, as text; empty when it can."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch

from mindspeed_kernels.npu_builds import call_missing
from mindspeed_megatron.devices.ascend_generations import generation_of


def device_missing(device_type: str) -> str:
    """Return why there is no device of a type here; empty when there is one."""
    if device_type == "cpu":
        return ""
    if device_type == "cuda":
        return "" if torch.cuda.is_available() else "no CUDA device"
    if device_type == "npu":
        reason = torch_npu_missing()
        if reason:
            return reason
        return "" if torch.npu.is_available() else "no Ascend device"  # type: ignore[attr-defined]
    module = getattr(torch, device_type, None)
    available = getattr(module, "is_available", None)
    return "" if available is not None and available() else f"no device of type {device_type}"


def torch_npu_missing() -> str:
    """Return why ``torch_npu`` cannot be used; empty when it can."""
    return package_missing("torch_npu")


@cache
def ascend_generation() -> str:
    """Return the generation of this process's devices as CANN names it, ``910B``; empty where unknown."""
    return generation_of(torch.npu.get_device_name()) if hasattr(torch, "npu") else ""


def kernel_of(
    *generations: str, calls: Sequence[str] = (), arguments: Sequence[str] = ()
) -> Callable[[], str]:
    """Return what tells why a kernel cannot be used that only some devices and builds have.

    Args:
        generations: of devices that have it. Where the generation is not known, it is taken to be there.
        calls: names of torch_npu that not every supported build has.
        arguments: of those calls, that not every build takes.
    """

    def missing() -> str:
        reason = torch_npu_missing()
        if reason:
            return reason
        found = ascend_generation()
        if found not in ("", *generations):
            return f"there is no such kernel for Ascend {found}"
        return next(filter(None, (call_missing(call, *arguments) for call in calls)), "")

    return missing


kernel_of_training_devices = kernel_of("910B", "910_93", "950")
"""Tells why a kernel cannot be used that devices for inference lack."""


def package_missing(name: str) -> str:
    """Return why a package cannot be imported; empty when it can."""
    if name in sys.modules:
        return ""
    if find_spec(name) is None:
        return f"package {name} is not installed"
    try:
        import_module(name)
    except Exception as error:
        return f"package {name} cannot be imported: {type(error).__name__}: {error}"
    return ""


def always() -> str:
    """Return no reason: available everywhere."""
    return ""
