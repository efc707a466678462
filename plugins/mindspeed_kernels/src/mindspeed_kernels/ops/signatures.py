"""Functions that share the signature of another one, so that long argument lists are written once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def with_signature_of(model: Callable[P, R]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Decorate a function that takes the arguments of ``model`` by name: it is then called like ``model``.

    Defaults are filled in, so that the function can pass on as ``**others`` what it does not look at.
    """
    signature = inspect.signature(model)
    names = tuple(signature.parameters)
    defaults = {
        name: parameter.default
        for name, parameter in signature.parameters.items()
        if parameter.default is not parameter.empty
    }

    def decorate(function: Callable[..., R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> R:
            return function(**{**defaults, **dict(zip(names, args)), **options})

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate
