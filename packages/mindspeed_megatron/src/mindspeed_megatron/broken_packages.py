"""Optional packages that are installed and cannot be imported: taken as absent, with the reason.

Whoever uses an optional package imports it and catches ``ImportError``, megatron-core and torch too. One
whose native library is missing raises something else, ``OSError`` for instance, and ends a training that has
no use for it. Inside of our programs it is a missing module too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mindspeed_megatron.devices.cann import hold_back_torch_npu

if TYPE_CHECKING:
    from importlib.abc import Loader

OPTIONAL = ("transformer_engine", "flash_attn", "triton", "apex")
"""Packages that only some machines have, and that nothing here needs."""
_USED = {"transformer_engine": "transformer_engine.pytorch"}
"""The part of a package that is used, where the package imports without it."""


def take_broken_as_absent() -> None:
    """Let optional packages that raise when they are imported be missing modules in this process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def guard_imports() -> None:
    """Let a process import torch and megatron-core where what they use on their own is broken here."""
    hold_back_torch_npu()
    take_broken_as_absent()


def used_module(package: str) -> str:
    """Return the module whose import shows that an optional package works."""
    return _USED.get(package, package)


@cache
def why_unusable(package: str) -> str:
    """Return why a package cannot be imported, empty where it can; imports it, where it is installed."""
    used = used_module(package)
    if used in sys.modules:
        return ""
    if find_spec(package) is None:
        return f"{package} is not installed"
    try:
        import_module(used)
    except Exception as error:
        return f"{package} is installed and cannot be imported: {type(error).__name__}: {error}"
    return ""


class _Finder:
    """Finds what the others find, with a loader that knows missing modules alone."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in OPTIONAL:
            return None
        # Others may ask all that stand behind them, too.
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    guarded: Any = _Loader(spec.loader)
                    spec.loader = guarded
                return spec
        return None


class _Loader:
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        try:
            self._loader.exec_module(module)
            used = used_module(module.__name__)
            if used != module.__name__:
                import_module(used)
        except ModuleNotFoundError:
            raise
        except Exception as error:
            # Some of megatron-core catches no other ImportError.
            raise ModuleNotFoundError(f"{type(error).__name__}: {error}", name=module.__name__) from error
