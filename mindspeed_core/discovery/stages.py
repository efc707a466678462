"""The stages as data: what declarations are checked against, without pluggy and without importing a host."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from types import FunctionType
from typing import Any

from mindspeed_core.feature import PROJECT
from mindspeed_core.hooks.versions import parsed

_VARIABLE = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


@dataclass(frozen=True)
class Stage:
    """A stage that implementations can be checked against without importing what it is made of.

    Attributes:
        name: the hook's name.
        arguments: what it offers, or ``None`` where that is known only when a session opens.
        firstresult: the first result ends it; ``False`` collects every implementation's result.
        since: the version of the hook interface that brought it.
        added: arguments that came later, with the version of each.
    """

    name: str
    arguments: frozenset[str] | None
    firstresult: bool
    since: str = "1.0"
    added: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Stage:
        """Return the stage that a function marked with ``hookspec`` specifies."""
        options = getattr(function, PROJECT + "_spec")
        return cls(
            function.__name__,
            frozenset(inspect.signature(function).parameters),
            bool(options["firstresult"]),
            getattr(function, "__mindspeed_since__", "1.0"),
            getattr(function, "__mindspeed_added__", {}),
        )

    def needed(self, arguments: Iterable[str]) -> str:
        """Return the oldest version of the hook interface that has the stage with these arguments."""
        return max((self.since, *(self.added.get(name, self.since) for name in arguments)), key=parsed)


@cache
def core_specifications() -> Mapping[str, Callable[..., Any]]:
    """Return the functions of `mindspeed_core.hooks` that are marked with ``hookspec``, by name."""
    from mindspeed_core.hooks import STAGE_MODULES

    functions = [function for name in STAGE_MODULES for function in vars(import_module(name)).values()]
    return {f.__name__: f for f in functions if hasattr(f, PROJECT + "_spec")}


@cache
def core_stages() -> Mapping[str, Stage]:
    """Return the stages of `mindspeed_core.hooks` by name."""
    return {name: Stage.of(function) for name, function in core_specifications().items()}


def wanted_arguments(function: Callable[..., Any]) -> list[str]:
    """Return the arguments that an implementation asks a stage for, without ``self``.

    Raises:
        TypeError: the implementation has no signature.
        ValueError: the same.
    """
    if isinstance(function, FunctionType) and not hasattr(function, "__wrapped__"):
        code = function.__code__
        if not code.co_kwonlyargcount and not code.co_flags & _VARIABLE:
            # The same as below and ten times as fast: features have hundreds of implementations.
            return list(code.co_varnames[1 : code.co_argcount - len(function.__defaults__ or ())])
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return [parameter.name for parameter in parameters if parameter.default is parameter.empty]
