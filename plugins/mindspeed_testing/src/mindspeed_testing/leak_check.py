"""Leak check of sessions: attributes of torch and megatron, environment variables, before and after.

Every module and class of the two packages is looked at. Values that training itself keeps (numbers, caches,
process groups) come and go; functions, classes and names do not, and are compared by identity.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

PACKAGES = ("torch", "megatron")
_LAZY = ("torch.ops", "torch._ops", "torch.classes", "torch._classes")
"""Their attributes are made when somebody asks for them."""
_FOUND_LATER = {("torch._opaque_base", "_FakeScriptObject_cls")}
"""Attributes that torch fills on first use and keeps."""
_SET_LATER = {"TORCHINDUCTOR_CACHE_DIR"}
"""Environment variables that torch sets to its default on first use and keeps."""
_COMPARED = (FunctionType, BuiltinFunctionType, type, staticmethod, classmethod, property)

_CHANGING = object()
_ABSENT = object()


@dataclass(frozen=True)
class ProcessState:
    """The process at one moment.

    Attributes:
        attributes: by module, name and, for classes, name within the class.
        environment: the environment variables.
    """

    attributes: Mapping[tuple[str, ...], Any]
    environment: Mapping[str, str]

    @classmethod
    def now(cls) -> ProcessState:
        """Look at the process as it is."""
        return cls(dict(_attributes()), dict(os.environ))

    def left_since(self, before: ProcessState) -> list[str]:
        """List the differences from an earlier state, one phrase each.

        Names that appeared are left out where their whole module is new, or where they are modules.
        """
        found = []
        modules = {key[0] for key in before.attributes}
        for key, value in self.attributes.items():
            if key[0] not in modules:
                continue
            then = before.attributes.get(key, _ABSENT)
            if then is _ABSENT:
                # A class that is imported later brings all of its attributes with it.
                if value is not _CHANGING and (len(key) == 2 or key[:2] in before.attributes):
                    found.append(f"{'.'.join(key)} is new")
            elif then is not value:
                found.append(f"{'.'.join(key)} is another object")
        found += [f"{'.'.join(key)} is gone" for key in before.attributes if key not in self.attributes]
        for name in sorted({*self.environment, *before.environment}):
            if name in _SET_LATER and name not in before.environment:
                continue
            if self.environment.get(name) != before.environment.get(name):
                found.append(f"environment variable {name} changed")
        return found


def _attributes() -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in PACKAGES or name.startswith(_LAZY):
            continue
        if not issubclass(type(module), ModuleType):
            continue
        # Lazy modules import on access: read their namespace, never the attributes.
        for key, value in list(ModuleType.__getattribute__(module, "__dict__").items()):
            # Its type, never its __class__: asking some objects of torch for that warns.
            kind = type(value)
            if issubclass(kind, ModuleType) or (name, key) in _FOUND_LATER:
                continue
            yield (name, key), _shown(value)
            if issubclass(kind, type) and value.__module__ == name:
                for attribute, raw in list(vars(value).items()):
                    yield (name, key, attribute), _shown(raw)


def _shown(value: Any) -> Any:
    return value if issubclass(type(value), _COMPARED) else _CHANGING
