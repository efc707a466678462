"""Conditions of a feature: slots, requirements, conflicts, substitutes; parts of `mindspeed_core.feature`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from mindspeed_core.errors import DeclarationError

_SLOT_NAME = re.compile(r"[a-z0-9]+([-./][a-z0-9]+)*\Z")


@dataclass(frozen=True)
class Slot:
    """An exclusive role that at most one active feature fills.

    Attributes:
        name: for instance ``core-attention``.
        summary: what filling it means, one line.
        exclusive: ``False`` for a slot that only groups features.
        roles: roles of the modules that filling it replaces, as `SpecEditor` names them: a feature that
            replaces one of them by `Feature.replaces_roles` excludes whoever fills the slot.
    """

    name: str
    summary: str = ""
    exclusive: bool = True
    roles: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _SLOT_NAME.match(self.name):
            raise DeclarationError(f"slot {self.name!r}: lower-case words joined by - . or /")
        object.__setattr__(self, "roles", tuple(self.roles))


@dataclass(frozen=True)
class Requirement:
    """Condition under which a feature may be active.

    Exactly one of ``feature``, ``any_of`` and ``flag`` is given.

    Attributes:
        feature: the name of another feature.
        any_of: names of features of which at least one must be active.
        flag: an option string of any owner; ``equals`` or ``one_of`` restricts its value, otherwise it
            has to be set (truthy).
        equals: the value that ``flag`` must have.
        one_of: the values of which ``flag`` must have one; a flag of several values has no other ones.
        reason: what a user reads when it does not hold.
        implies: switch the required feature on instead of complaining, when its own flags need no decision.
        remedy: what to type where it does not hold (``"add --pipeline-schedule zb-h1"``); by default the
            first flag of the required feature, or the required value.
    """

    feature: str = ""
    any_of: tuple[str, ...] = ()
    flag: str = ""
    equals: Any = None
    one_of: tuple[Any, ...] = ()
    reason: str = ""
    implies: bool = False
    remedy: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "any_of", tuple(self.any_of))
        object.__setattr__(self, "one_of", tuple(self.one_of))
        given = [bool(self.feature), bool(self.any_of), bool(self.flag)]
        if sum(given) != 1:
            raise DeclarationError("a requirement names exactly one of feature, any_of, flag")
        if self.implies and not self.feature:
            raise DeclarationError("only a requirement on a feature can imply it")


@dataclass(frozen=True)
class Conflict:
    """Condition under which a feature may not be active.

    Attributes:
        feature: the name of another feature (the conflict is symmetric), or
        flag: an option string; the conflict is that it is set, or has the value ``equals`` / ``one_of``.
        equals: the offending value of ``flag``.
        one_of: the offending values of ``flag``; one of them is enough in a flag of several values.
        reason: what a user reads.
    """

    feature: str = ""
    flag: str = ""
    equals: Any = None
    one_of: tuple[Any, ...] = ()
    reason: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "one_of", tuple(self.one_of))
        if bool(self.feature) == bool(self.flag):
            raise DeclarationError("a conflict names exactly one of feature, flag")


@dataclass(frozen=True)
class Fallback:
    """Substitute on a platform, or in a mode, that a feature does not support.

    Attributes:
        reason: why it cannot run there; printed with the plan.
        feature: another feature that takes over, or empty: the feature is simply left out.
    """

    reason: str
    feature: str = ""


@dataclass(frozen=True)
class TakeOver:
    """Feature whose work the declaring one does: where both are requested, it is held back.

    Requirements on the one that is held back hold all the same; its slots, conflicts and checks do not count.

    Attributes:
        feature: the name of the feature that is held back.
        reason: why it has nothing left to do; printed with the plan.
    """

    feature: str
    reason: str
