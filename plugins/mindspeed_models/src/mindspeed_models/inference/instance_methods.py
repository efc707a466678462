"""Methods of single modules that another function stands in for, until a block ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch


@contextmanager
def methods_replaced(
    chunk: torch.nn.Module, name: str, function_of: Callable[[Any], Callable[..., Any] | None]
) -> Iterator[None]:
    """Let functions stand in for a method of a chunk's modules until the block ends.

    Args:
        chunk: its modules are asked.
        name: of the method. Modules on which somebody has set one of their own stay as they are.
        function_of: returns the function for a module, which gets the module first; None leaves it alone.
    """
    changed: list[Any] = []
    for module in chunk.modules():
        if name not in vars(module) and (function := function_of(module)) is not None:
            setattr(module, name, partial(function, module))
            changed.append(module)
    try:
        yield
    finally:
        for module in changed:
            del vars(module)[name]
