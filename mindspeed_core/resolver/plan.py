"""The resolver's result: what is active, in which order, why, and what is not.

Plain immutable data without torch, so that it can be printed, compared between ranks, stored in a checkpoint
and computed a thousand times a second by a search.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mindspeed_core.discovery.host import DEFAULT_HOST
from mindspeed_core.errors import UserError
from mindspeed_core.feature import Patch
from mindspeed_core.flags.notes import FlagNote


@dataclass(frozen=True)
class ActiveFeature:
    """One active feature; ``why`` is the flag that asked for it, or ``implied by NAME``.

    ``affects_checkpoint`` tells a run in which its package is not installed whether it can do without.
    """

    name: str
    dist: str
    version: str
    family: str
    level: int
    why: str
    affects_checkpoint: bool | None = None


@dataclass(frozen=True)
class HeldBack:
    """A feature that is not active, and the reason (optimization level, platform, mode).

    ``broken`` says that nobody asked for it and its own code fails, which must not stop the training.
    """

    name: str
    reason: str
    flag: str = ""
    remedy: str = ""
    broken: bool = False


@dataclass(frozen=True)
class Note:
    """A sentence about this run for whoever starts it: of a feature, or of the host without one."""

    feature: str
    text: str

    def __str__(self) -> str:
        """Return one line for a terminal."""
        return f"{self.feature}: {self.text}" if self.feature else self.text


@dataclass(frozen=True)
class Unread:
    """A flag that was given and that nothing reads.

    Attributes:
        flag: the option string as it was given.
        reason: why nothing reads it, one sentence.
        remedy: what to do for it to have an effect.
        feature: the feature that would read it.
        value: its value as text; empty for a switch.
        held_back: the feature that would read it was asked for and is not active, which the plan says.
    """

    flag: str
    reason: str
    remedy: str = ""
    feature: str = ""
    value: str = ""
    held_back: bool = False

    def __str__(self) -> str:
        """Return one line for a terminal."""
        given = f"{self.flag} {self.value}".rstrip()
        return f"{given} has no effect: {self.reason}" + (f"; {self.remedy}" if self.remedy else "")


@dataclass(frozen=True)
class Problem:
    """One thing that prevents a plan.

    Attributes:
        code: for instance ``E-CONFLICT``.
        reason: one sentence.
        remedy: what to do.
        feature: the feature concerned, if any.
        flag: the flag that caused it, if any.
        value: the flag's value as text; empty for a switch, for a missing flag, and where ``reason`` says it.
    """

    code: str
    reason: str
    remedy: str = ""
    feature: str = ""
    flag: str = ""
    value: str = ""

    def __str__(self) -> str:
        """Return one or two lines for a terminal."""
        where = f" {self.feature}" if self.feature else ""
        flag = f" ({f'{self.flag} {self.value}'.rstrip()})" if self.flag else ""
        remedy = f"\n    -> {self.remedy}" if self.remedy else ""
        return f"{self.code}{where}{flag}: {self.reason}{remedy}"


_OF_USAGE = frozenset({"E-UNKNOWN-FLAG", "E-FLAG-VALUE"})


class PlanError(UserError):
    """The arguments cannot be resolved; carries every problem, not only the first.

    Its exit status is 2, that of wrong usage, where all of them are unknown flags or malformed values.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        """Keep the problems and make one message of them."""
        self.problems = tuple(problems)
        self.exit_status = 2 if {problem.code for problem in problems} <= _OF_USAGE else 1
        count = len(self.problems)
        head = f"{count} problem{'s' if count != 1 else ''} with these arguments:"
        super().__init__("\n".join([head, *(f"  {problem}" for problem in self.problems)]))


@dataclass(frozen=True)
class Plan:
    """The features, slots, patches and arguments of one session.

    Attributes:
        features: the active features, dependencies first; earlier means the outer wrapper.
        held_back: requested but not active.
        slots: who fills which exclusive slot.
        patches: every patch of an active feature, with its owner.
        platform: ``cpu``, ``cuda``, ``npu``, or a third party's.
        host: the host.
        level: the optimization level.
        mode: ``train`` or ``inference``.
        arguments: the values of the flags that active features declare, by destination.
        digest: SHA-256 over all of it; equal on every rank and machine for equal input.
        notes: what the host and active features say about these arguments; no part of the digest.
        flag_notes: given flags that change nothing here, or are read as others; no part of the digest.
        stated_order: why features stand where they do, as far as they say so, a phrase each.
        unread: flags that were given and that nothing reads; those of features that are held back included.
    """

    features: tuple[ActiveFeature, ...] = ()
    held_back: tuple[HeldBack, ...] = ()
    slots: Mapping[str, str] = field(default_factory=dict)
    patches: tuple[Patch, ...] = ()
    platform: str = "cpu"
    host: str = DEFAULT_HOST
    level: int = 2
    mode: str = "train"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    digest: str = ""
    notes: tuple[Note, ...] = ()
    stated_order: tuple[str, ...] = ()
    unread: tuple[Unread, ...] = ()
    flag_notes: tuple[FlagNote, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the active features' names in order."""
        return tuple(feature.name for feature in self.features)

    def __contains__(self, name: object) -> bool:
        """Return whether a feature is active."""
        return name in self.names

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-able form, stored in checkpoints; patches appear as target, kind and owner."""
        data = {
            "features": [asdict(feature) for feature in self.features],
            "held_back": [asdict(held) for held in self.held_back],
            "slots": dict(self.slots),
            "patches": [
                {"target": patch.target, "kind": patch.kind, "owner": patch.owner, "reason": patch.reason}
                for patch in self.patches
            ],
        }
        for name in ("platform", "host", "level", "mode", "digest"):
            data[name] = getattr(self, name)
        data["arguments"] = dict(self.arguments)
        return data
