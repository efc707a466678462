"""Faults planted into copies of real modules, to see that the lagging device names each.

A fault replaces text of a module's source. The functions in which it stands run changed inside a context of
one process, wherever they are held.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any


@dataclass(frozen=True)
class PlantedFault:
    """A change of a module.

    Attributes:
        module: its name.
        old: text that occurs once in its source.
        new: what stands there instead.
    """

    module: str
    old: str
    new: str


@contextmanager
def planted(fault: PlantedFault) -> Iterator[None]:
    """Run with changed functions of a module inside the context, whoever holds them.

    Args:
        fault: the change.

    Raises:
        ValueError: its text does not occur exactly once.
    """
    module = importlib.import_module(fault.module)
    path = str(module.__file__)
    source = Path(path).read_text(encoding="utf-8")
    if source.count(fault.old) != 1:
        raise ValueError(f"{fault.module}: {fault.old!r} occurs {source.count(fault.old)} times, not once")
    changed = functions_of(compile(source.replace(fault.old, fault.new), path, "exec"))
    before: list[tuple[Any, CodeType]] = []
    for names, code in changed.items():
        function = function_of(module, names)
        # Instructions may be equal where a name or a constant is another.
        if function is not None and function.__code__ != code:
            before.append((function, function.__code__))
            function.__code__ = code
    if not before:
        raise ValueError(f"{fault.module}: {fault.old!r} is in no function")
    try:
        yield
    finally:
        for function, code in before:
            function.__code__ = code


def functions_of(code: CodeType, within: tuple[str, ...] = ()) -> dict[tuple[str, ...], CodeType]:
    """Return the code of a module's functions and of its classes' methods, by their names."""
    found: dict[tuple[str, ...], CodeType] = {}
    for constant in code.co_consts:
        if isinstance(constant, CodeType) and not constant.co_name.startswith("<"):
            names = (*within, constant.co_name)
            if constant.co_flags & inspect.CO_NEWLOCALS:
                found[names] = constant
            else:
                found |= functions_of(constant, names)
    return found


def function_of(holder: Any, names: tuple[str, ...]) -> Any:
    """Return the function of these names, without what decorates it; None where there is none."""
    for name in names:
        holder = vars(holder).get(name)
        if holder is None:
            return None
    holder = getattr(holder, "__func__", getattr(holder, "fget", holder))
    while hasattr(holder, "__wrapped__"):
        holder = holder.__wrapped__
    return holder if isinstance(holder, FunctionType) else None
