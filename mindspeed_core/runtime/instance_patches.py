"""Changes on built instances (a rotary module, an embedding's forward), recorded and taken back like patches.

Instances are held weakly: a change is gone with its model, and closing a session restores what still lives.
The roles of the modules that features replace are counted beside them, for the message about one that found
none of its modules.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mindspeed_core.errors import PatchError

_ABSENT = object()


@dataclass(frozen=True)
class InstanceChange:
    """One recorded change: ``owner`` set ``attribute`` of an instance of ``type_name``."""

    owner: str
    type_name: str
    attribute: str


class Instances:
    """The changes of one session."""

    def __init__(self) -> None:
        """Start without changes."""
        # The new values are in the instances alone: most of them hold their instance.
        self._changes: list[tuple[InstanceChange, weakref.ref[Any], Any]] = []
        self._suspended: list[tuple[InstanceChange, weakref.ref[Any], Any]] = []

    def set(self, owner: str, instance: Any, attribute: str, value: Any) -> None:
        """Set an attribute in the instance's own dictionary and remember what was there.

        Args:
            owner: the feature's name.
            instance: a module, optimizer or any weakly referenceable object.
            attribute: its attribute; methods work (bind the function first), dunder methods do not.
            value: the new value.

        Raises:
            PatchError: the change could have no effect, or the instance has no such attribute.
        """
        kind = type(instance).__qualname__
        if attribute.startswith("__") and attribute.endswith("__"):
            raise PatchError(
                f"{owner}: {kind}.{attribute} is looked up on the type, changing the instance has no effect"
            )
        if not hasattr(instance, attribute):
            raise PatchError(f"{owner}: {kind} has no attribute {attribute!r} to change")
        old = _value(instance, attribute)
        setattr(instance, attribute, value)
        self._changes.append((InstanceChange(owner, kind, attribute), weakref.ref(instance), old))

    def placed(self, owner: str) -> int:
        """Count the changes an owner has made."""
        return sum(change.owner == owner for change, *_ in self._changes)

    def listing(self) -> list[InstanceChange]:
        """Return the changes on instances that still live."""
        return [change for change, ref, _ in self._changes if ref() is not None]

    def suspend(self) -> None:
        """Take every change back like `revert`, and remember it for `resume`."""
        suspended = []
        while self._changes:
            change, ref, old = self._changes.pop()
            instance = ref()
            if instance is not None:
                suspended.append((change, ref, _value(instance, change.attribute)))
                _restore(instance, change.attribute, old)
        self._suspended += reversed(suspended)

    def resume(self) -> None:
        """Make the changes that `suspend` took back once more, on instances that still live."""
        suspended, self._suspended = self._suspended, []
        for change, ref, value in suspended:
            instance = ref()
            if instance is not None:
                self.set(change.owner, instance, change.attribute, value)

    def revert(self) -> None:
        """Take every change back, last first, on instances that still live."""
        while self._changes:
            change, ref, old = self._changes.pop()
            instance = ref()
            if instance is not None:
                _restore(instance, change.attribute, old)


def _value(instance: Any, attribute: str) -> Any:
    """Return what stands in the instance's own dictionary, or among the modules of a module."""
    namespace = vars(instance)
    if attribute in namespace.get("_modules", {}):
        return namespace["_modules"][attribute]
    return namespace.get(attribute, _ABSENT)


def _restore(instance: Any, attribute: str, old: Any) -> None:
    if old is _ABSENT:
        delattr(instance, attribute)
    else:
        setattr(instance, attribute, old)


@dataclass
class Roles:
    """The roles of modules that one feature was concerned with on this rank.

    Attributes:
        sought: what it asked for.
        present: what the specifications had.
        replaced: what it replaced without containing it, each behind the roles around it
            (``layer.mlp.fc1``).
    """

    sought: set[str] = field(default_factory=set)
    present: set[str] = field(default_factory=set)
    replaced: set[str] = field(default_factory=set)

    def add(self, sought: Iterable[str], present: Iterable[str], replaced: Iterable[str]) -> None:
        """Add the roles of one search."""
        self.sought.update(sought)
        self.present.update(present)
        self.replaced.update(replaced)


def nothing_matched(asked: Mapping[str, str], ranks: Iterable[Mapping[str, Roles]]) -> str:
    """Compose the message about features that have found none of their modules.

    Args:
        asked: the features, each with the flag that asked for it, or another reason.
        ranks: per rank the roles by feature.
    """
    together: dict[str, Roles] = {}
    for roles in ranks:
        for name in asked.keys() & roles.keys():
            together.setdefault(name, Roles()).add(roles[name].sought, roles[name].present, ())
    lines = [f"{', '.join(asked)}: active, but matched no module of this model on any rank."]
    lines += [
        f"{name} looked for {' '.join(sorted(roles.sought))}; there are {' '.join(sorted(roles.present))}."
        for name, roles in sorted(together.items())
        if roles.sought
    ]
    flags = sorted({why for why in asked.values() if why.startswith("--")})
    drop = f"Drop {' '.join(flags)}" if flags else "Drop the flag"
    lines.append(
        f"{drop}, or check that the model has the modules the feature works on (mindspeed-features show NAME)"
    )
    return " ".join(lines)
