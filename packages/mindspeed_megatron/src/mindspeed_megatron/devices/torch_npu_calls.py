"""Calls of the installed torch_npu that it does not take as the installed packages make them.

Builds of torch_npu differ in names and arguments. What the sources call is held against the schemas of the
build that is imported, without a device: so a build that is newer than every one that was checked tells in
seconds what it changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

from mindspeed_megatron.devices.torch_npu_uses import ROOTS, ApiUse, api_uses, guards

_NAMESPACES = ("npu", "atb")


@dataclass(frozen=True)
class Unserved:
    """A call that the build does not take.

    Attributes:
        name: what is called, ``torch_npu.npu_swiglu``.
        place: file and line, ``ops/swiglu.py:12``.
        lacking: arguments that are not taken; empty where the name itself is absent.
        asked_first: the sources ask for it before they call: another backend takes over.
    """

    name: str
    place: str
    lacking: tuple[str, ...]
    asked_first: bool

    def __str__(self) -> str:
        """Return name, what is lacking and place."""
        short = self.name.rpartition(".")[2]
        fault = f"takes no {', '.join(self.lacking)}" if self.lacking else "is absent"
        return f"{short} {fault} ({self.place})"


def unserved_calls(folders: Iterable[Path]) -> list[Unserved]:
    """Return the calls in the Python files below folders that the imported torch_npu does not take."""
    folders = tuple(folders)
    asked = guards(folders)
    found = []
    for use in api_uses(folders):
        lacking = _lacking(use)
        if lacking is None:
            continue
        known = asked.get(use.name.rpartition(".")[2])
        place = f"{use.path.parent.name}/{use.path.name}:{use.line}"
        found.append(Unserved(use.name, place, lacking, known is not None and known >= {*lacking}))
    return found


def _lacking(use: ApiUse) -> tuple[str, ...] | None:
    """Return the arguments that are not taken, none for an absent name; None for a call that is taken."""
    forms = list(_forms(use.name))
    if not forms:
        return ()
    if not use.is_call or any(form is None for form in forms):
        return None
    lacking = min((_left_over(use, form) for form in forms if form is not None), key=len)
    return lacking or None


def _left_over(use: ApiUse, form: tuple[str, ...]) -> tuple[str, ...]:
    unknown = tuple(name for name in use.keywords if name not in form)
    return unknown or ((f"more than {len(form)} arguments",) if use.positional > len(form) else ())


def _forms(name: str) -> Iterator[tuple[str, ...] | None]:
    """Yield the argument names of every form of a name; None for a form that takes any, or a value."""
    parent, _, short = name.rpartition(".")
    torch = import_module("torch")
    for namespace in _NAMESPACES:
        operations = getattr(torch.ops, namespace)
        if parent in ("torch_npu", f"torch.ops.{namespace}") and hasattr(operations, short):
            operator = getattr(operations, short)
            for overload in operator.overloads():
                schema = getattr(operator, overload)._schema
                yield tuple(argument.name for argument in schema.arguments)
            return
    found = resolve(name)
    if found is None:
        return
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        yield None
        return
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    yield None if any(one.kind in open_ended for one in parameters) else tuple(one.name for one in parameters)


def resolve(name: str) -> Any:
    """Return the object behind a dotted name of torch_npu; None when there is none."""
    root = next(root for root in ROOTS if name.startswith(root + "."))
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            module: Any = import_module(".".join(parts[:length]))
        except ImportError:
            continue
        try:
            return reduce(getattr, parts[length:], module)
        except AttributeError:
            if ".".join(parts[:length]) == root.partition(".")[0]:
                return None
    return None
