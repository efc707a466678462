"""References through torch's compiler: the backend ``compiled``.

Compiling takes seconds to minutes at the first call of each kind, so it is never chosen by itself. Platforms
that hold ``torch.compile`` in eager mode mean megatron-core's own decorated functions; for the length of a
call this backend, which is only ever forced, compiles nevertheless.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from mindspeed_kernels.ops.backend import Backend
from mindspeed_kernels.ops.operator import Operator

NAME = "compiled"
COMPILER = "inductor"
"""The name of torch's compiler."""


def compiler_missing() -> str:
    """Return why nothing can be compiled for CPU here; empty when it can."""
    if COMPILER != "inductor" or any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        return ""
    return "no C++ compiler (g++ or clang++) is on the PATH"


def add_compiled(operator: Operator[..., Any]) -> None:
    """Give an operator, whose reference must be traceable without a break, the backend ``compiled``."""

    @lru_cache(maxsize=1)
    def compiled() -> Callable[..., Any]:
        function: Callable[..., Any] = torch.compile(operator.reference, backend=COMPILER, fullgraph=True)
        return function

    def call(*args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            # Inside of a larger graph the reference is compiled with the graph around it.
            return operator.reference(*args, **options)
        with torch.compiler.set_stance("default"):
            return compiled()(*args, **options)

    operator.add(Backend(operator.name, NAME, call, ("cpu",), priority=-200, available=compiler_missing))
