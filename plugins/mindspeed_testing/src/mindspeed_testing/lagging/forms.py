"""The arguments of operators: which of them are written, which results are views."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_PYTHON_NAMESPACES = ("mindspeed",)
COPIES = frozenset({"aten::copy_", "aten::_to_copy"})
_MADE_LIKE = frozenset(
    f"aten::{name}"
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    )
)
"""Operators that take shape, dtype and device of a tensor and read none of its values."""


@dataclass(frozen=True)
class Form:
    """The arguments of an operator.

    Attributes:
        name: without overload.
        is_view: it moves nothing.
        is_python: Python defines it, of operations that are followed each.
        passes: it is not followed: it moves nothing, or is a collective, which is followed elsewhere.
        reads: it reads values of its arguments, not their shapes alone.
        places: positions and names of arguments that it writes.
    """

    name: str
    is_view: bool
    is_python: bool
    passes: bool
    reads: bool
    places: tuple[tuple[int, str], ...]

    def written(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Return the arguments that are written."""
        found = []
        for index, name in self.places:
            if index < len(args):
                found.append(args[index])
            elif name in kwargs:
                found.append(kwargs[name])
        return found


_forms: dict[int, tuple[Any, Form]] = {}
"""Operators by ``id`` with their forms: their own hash is a call of Python."""


def form_of(func: Any) -> Form:
    """Return the form of an operator."""
    found = _forms.get(id(func))
    if found is None:
        found = _forms[id(func)] = func, _read(func)
    return found[1]


def _read(func: Any) -> Form:
    schema = func._schema
    places = tuple(
        (index, argument.name)
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    aliases = [one.alias_info for one in schema.returns if one.alias_info is not None]
    is_view = bool(aliases) and not any(alias.is_write for alias in aliases) and not places
    is_python = func.namespace.startswith(_PYTHON_NAMESPACES)
    passes = is_view or func.namespace == "c10d"
    return Form(schema.name, is_view, is_python, passes, schema.name not in _MADE_LIKE, places)


def non_blocking(form: Form, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a copy between host and device lets the host go on."""
    if form.name not in COPIES:
        return False
    return bool(kwargs.get("non_blocking", form.name == "aten::copy_" and len(args) > 2 and args[2]))
