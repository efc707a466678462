"""Every kernel whose contract is written, by operation; one module per family of kernels."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from mindspeed_testing.npu.kernels.contract import Kernel


@cache
def all_kernels() -> dict[str, Kernel]:
    """Return the kernels of every module of this package, by operation."""
    found: dict[str, Kernel] = {}
    for module in iter_modules(__path__):
        for kernel in getattr(import_module(f"{__name__}.{module.name}"), "KERNELS", ()):
            assert kernel.operation not in found, f"two contracts of {kernel.operation}"
            found[kernel.operation] = kernel
    return found
