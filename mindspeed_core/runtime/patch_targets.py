"""Targets of patches: the namespace that holds a symbol, and exact reading and writing of it.

A symbol of somebody else's module is held by a namespace (a module's or class's dictionary) as a raw object:
a function, a ``staticmethod``, a property. Reading it with ``getattr`` would hand out something bound, and
writing that back would break subclasses; so everything here goes through ``vars``. Apart from `patches`,
which decides what changes, because finding and refusing targets is a subject of its own.
"""

from __future__ import annotations

import enum
import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any

from mindspeed_core.errors import PatchError

ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "<absent>"})()
"""Stands for "the namespace has no such name"."""

_IMMUTABLE_TYPE = 1 << 8
_HEAP_TYPE = 1 << 9
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset, type(Ellipsis), ModuleType)
_module_namespace: Callable[[ModuleType], dict[str, Any]] = vars(ModuleType).__getitem__("__dict__").__get__


class MissingTarget(PatchError):
    """The module or the name does not exist."""


@dataclass(frozen=True, eq=False)
class Holder:
    """One place that holds an object: a name in a module, a class or an instance.

    Attributes:
        container: the module, class or instance.
        name: the attribute.
        label: ``module:Qual.name`` for messages.
    """

    container: Any
    name: str
    label: str

    @property
    def key(self) -> tuple[int, str]:
        """Return the identity of the place."""
        return id(self.container), self.name

    @property
    def package(self) -> str:
        """Return the top-level package of the module."""
        return self.label.partition(":")[0].partition(".")[0]

    def own(self) -> Any:
        """Return the raw object in the container's own namespace, or `ABSENT`."""
        return namespace_of(self.container).get(self.name, ABSENT)

    def raw(self) -> Any:
        """Return the raw object in the container's namespace; for a class, also in its bases."""
        own = self.own()
        if own is not ABSENT:
            return own
        if isinstance(self.container, type):
            for klass in self.container.__mro__[1:]:
                if self.name in vars(klass):
                    return vars(klass)[self.name]
            return ABSENT
        if isinstance(self.container, ModuleType):
            return ABSENT
        return getattr(self.container, self.name, ABSENT)

    def write(self, value: Any) -> None:
        """Put a raw object there; `ABSENT` removes the name."""
        if value is ABSENT:
            delattr(self.container, self.name)
        elif isinstance(self.container, ModuleType):
            _module_namespace(self.container)[self.name] = value
        else:
            setattr(self.container, self.name, value)


def namespace_of(container: Any) -> Mapping[str, Any]:
    """Return the container's own dictionary, without running any code of the container."""
    if isinstance(container, ModuleType):
        return _module_namespace(container)
    return getattr(container, "__dict__", {})


def locate(target: str, owner: str) -> Holder:
    """Find the place that ``package.module:Qual.name`` names, importing the module.

    Raises:
        MissingTarget: the module, or a class on the way to the name, does not exist.
    """
    path, _, qualified = target.partition(":")
    try:
        container: Any = import_module(path)
    except ModuleNotFoundError as error:
        if error.name is not None and (path == error.name or path.startswith(error.name + ".")):
            raise MissingTarget(_missing(target, owner, f"there is no module {error.name}")) from error
        raise
    *parents, name = qualified.split(".")
    for parent in parents:
        container = getattr(container, parent, ABSENT)
        if container is ABSENT:
            raise MissingTarget(_missing(target, owner, f"there is no {parent!r} on the way to it"))
    return Holder(container, name, target)


def _missing(target: str, owner: str, part: str) -> str:
    return (
        f"{owner}: cannot patch {target}: {part}. The installed version differs from the one the patch was "
        "written for: install a supported version, or turn the feature off"
    )


def check_patchable(place: Holder, owner: str, *, adding: bool = False) -> None:
    """Refuse a place where a change would fail, or silently have no effect.

    Raises:
        MissingTarget: the name does not exist.
        PatchError: the reason why it cannot be patched.
    """
    container, name, raw = place.container, place.name, place.raw()

    def refuse(reason: str) -> None:
        raise PatchError(f"{owner}: cannot patch {place.label}: {reason}")

    if isinstance(container, enum.EnumMeta) and name in container.__members__:
        refuse("it is a member of an enumeration, which other code compares by identity")
    if isinstance(container, type):
        heap = bool(container.__flags__ & _HEAP_TYPE)
        if not heap or container.__flags__ & _IMMUTABLE_TYPE:
            refuse(f"{container.__qualname__} is an immutable type; patch a subclass or its callers")
        if isinstance(raw, MemberDescriptorType):
            refuse("it is a slot (__slots__), which instances need for their storage")
    elif not isinstance(container, ModuleType):
        if name.startswith("__") and name.endswith("__"):
            refuse("dunder methods are looked up on the type, a change of an instance has no effect")
        if not hasattr(container, "__dict__"):
            refuse(f"instances of {type(container).__qualname__} have __slots__ and no dictionary")
    if adding:
        return
    if raw is ABSENT:
        if isinstance(container, ModuleType) and getattr(container, name, ABSENT) is not ABSENT:
            refuse("the module makes it up in __getattr__ and does not hold it; patch where it is defined")
        raise MissingTarget(_missing(place.label, owner, f"there is no {name!r}"))
    if isinstance(raw, type):
        loaded: list[type] = type.__subclasses__(raw)
        children = [f"{child.__module__}.{child.__qualname__}" for child in loaded]
        if children:
            refuse(
                f"the class has loaded subclasses, which would keep the old one ({', '.join(children[:3])}); "
                "patch its methods, or choose another class through a ModuleSpec"
            )


def callable_of(raw: Any) -> Any:
    """Return what a wrapper receives: the function inside a descriptor, or the object itself."""
    if isinstance(raw, (staticmethod, classmethod)):
        return raw.__func__
    if isinstance(raw, property):
        return raw.fget
    if isinstance(raw, functools.cached_property):
        return raw.func
    if isinstance(raw, GetSetDescriptorType):
        return lambda instance: raw.__get__(instance, type(instance))
    return raw


def defined_at(raw: Any) -> str:
    """Return ``module:Qual.name`` of the definition of a function or class; empty where it does not say."""
    inside = callable_of(raw)
    module, qualified = getattr(inside, "__module__", None), getattr(inside, "__qualname__", None)
    return f"{module}:{qualified}" if isinstance(module, str) and isinstance(qualified, str) else ""


def like(raw: Any, new: Any, container: Any, name: str) -> Any:
    """Return the raw object to store for ``new``: wrapped in the same kind of descriptor as ``raw``."""
    if not isinstance(container, type):
        return new
    if isinstance(new, (staticmethod, classmethod, property, functools.cached_property)):
        return new
    if isinstance(raw, staticmethod):
        return staticmethod(new)
    if isinstance(raw, classmethod):
        return classmethod(new)
    if isinstance(raw, property):
        return property(new, raw.fset, raw.fdel, raw.__doc__)
    if isinstance(raw, functools.cached_property):
        cached: functools.cached_property[Any] = functools.cached_property(new)
        cached.__set_name__(container, name)
        return cached
    if isinstance(raw, GetSetDescriptorType):
        return property(new, raw.__set__, raw.__delete__, raw.__doc__)
    return new


def is_shared_by_name(raw: Any) -> bool:
    """Return whether other modules can hold this very object under a name; equal constants are one object."""
    return not isinstance(raw, _CONSTANTS)


def holders(objects: Iterable[Any]) -> dict[int, list[Holder]]:
    """Return every module attribute that is one of the objects, by ``id``; one pass over all loaded modules.

    Modules are read through their plain dictionary: nothing lazy is triggered.
    """
    wanted = {id(value) for value in objects}
    found: dict[int, list[Holder]] = {}
    seen: set[int] = set()
    if not wanted:
        return found
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):
            continue
        namespace = _module_namespace(module)
        if id(namespace) in seen or wanted.isdisjoint(map(id, list(namespace.values()))):
            continue
        seen.add(id(namespace))
        module_name = str(namespace.get("__name__", "?"))
        for name, value in list(namespace.items()):
            if id(value) in wanted:
                found.setdefault(id(value), []).append(Holder(module, name, f"{module_name}:{name}"))
    return found


def load(new: Any, owner: str, target: str) -> Any:
    """Resolve a lazily named object ``"module:attribute"``; anything else is returned unchanged."""
    if not isinstance(new, str) or ":" not in new:
        return new
    path, _, qualified = new.partition(":")
    try:
        return functools.reduce(getattr, qualified.split("."), import_module(path))
    except (ImportError, AttributeError) as error:
        raise PatchError(f"{owner}: the replacement {new} for {target} cannot be loaded: {error}") from error
