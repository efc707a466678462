"""A row of the patch table: a function of Megatron-LM, and how it is intercepted for a stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindspeed_core.feature import Patch

ARGUMENT, INSTANCE, GLOBAL, PATCH = "argument", "instance", "global", "patch"
ENTRY, STARTUP = "entry", "startup"
ALWAYS = ("cpu", "cuda", "npu")
"""Platforms of rows that every session needs."""
_HERE = "mindspeed_megatron.hosts.megatron_lm."


@dataclass(frozen=True)
class Interception:
    """One row.

    Attributes:
        stages: the stages it serves.
        target: the function, as ``package.module:name``, or the argument's name.
        reason: why it is this way.
        wrapper: ``module:function`` in this package that makes the intercepted function from the original.
        mechanism: `ARGUMENT` (of ``pretrain``), `INSTANCE` (an attribute of an object), `GLOBAL` (a name of
            the script), `PATCH`, `ENTRY` (a patch that is there from the import of the adaptor on) or
            `STARTUP` (one that is there from the call of ``pretrain`` until the session opens).
        kind: of the patch, see `Patch`.
        platforms: kinds of platforms on which the host itself needs it, whatever is active.
        elsewhere: the host itself needs it on platforms of none of these kinds.
        features: needed as soon as any feature is active.
        without_te: needed where neither TransformerEngine nor Apex is installed.
        versions: what differs in older versions of Megatron-LM.
        required: a version without the symbol is an error.
        loaded: needed only where the script has imported the module of the target.
        argument: name of an argument and a text that its value must contain, for rows of one option.
        unless: a stage whose own interception hands out the same; then this one is not needed.
        handed: an argument of the script's ``model_provider`` that makes this one unnecessary.
        models: the host itself needs it for models with all of these arguments set.
        any_of: the host itself needs it in runs with one of these arguments.
    """

    stages: tuple[str, ...]
    target: str
    reason: str
    wrapper: str = ""
    mechanism: str = PATCH
    kind: str = "wrap"
    platforms: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()
    features: bool = False
    without_te: bool = False
    versions: str = ""
    required: bool = True
    loaded: bool = False
    argument: tuple[str, str] = ("", "")
    unless: str = ""
    handed: str = ""
    models: tuple[str, ...] = ()
    any_of: tuple[str, ...] = ()

    def patch(self) -> Patch:
        """Return the patch of the row."""
        new = _HERE + self.wrapper
        return Patch(self.target, new, kind=self.kind, reason=self.reason, required=self.required)


def intercepted(target: str, wrapper: str, stages: str, reason: str, **facts: Any) -> Interception:
    """Return the row of a symbol that a function of this package wraps for some stages."""
    return Interception(tuple(stages.split()), target, reason, wrapper, **facts)


def entry(target: str, wrapper: str, stages: str, reason: str, **facts: Any) -> Interception:
    """Return the row of a symbol that is wrapped from the import of the adaptor on."""
    return intercepted(target, wrapper, stages, reason, mechanism=ENTRY, **facts)


def by(mechanism: str, target: str, stages: str, reason: str, versions: str = "") -> Interception:
    """Return the row of a stage that needs no change of a symbol."""
    return intercepted(target, "", stages, reason, mechanism=mechanism, versions=versions)
