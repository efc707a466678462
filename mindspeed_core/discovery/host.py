"""Declarations of hosts, and the findings of their own checks of the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mindspeed_core.feature import Patch

DEFAULT_HOST = "standalone"
"""The host of the programs, where nobody names another one."""
LIBRARY_HOST = "library"
"""The host of `mindspeed_core.activate`, where nobody names another one: the loop is the caller's."""

OK, NOTE, WARNING, ERROR = "ok", "note", "warning", "error"
"""Severities of a `Finding`."""


@dataclass(frozen=True)
class Finding:
    """The result of one check of the machine.

    Attributes:
        severity: ``ok``, ``note`` (good to know), ``warning`` (slow or fragile), ``error`` (training cannot
            work).
        subject: what was looked at.
        observed: what is there, one sentence.
        remedy: what to do, empty where nothing needs doing.
    """

    severity: str
    subject: str
    observed: str
    remedy: str = ""


@dataclass(frozen=True)
class HostDeclaration:
    """A host: the default implementation of every stage, and the flags it owns.

    Attributes:
        name: for ``activate(..., host=name)``.
        summary: one line.
        flags: ``"module:function"`` returning the host's ``Flag`` tuple; must not import torch or megatron.
        stages: import paths of modules (or ``"module:object"``) whose ``@hookimpl(trylast=True)`` functions
            are the defaults; imported when a session opens.
        train: ``"module:function"`` that runs a whole training, called with an open session; the programs
            call it.
        patches: what the host itself has to change.
        absent: ``"module:function"`` that says why the host lacks a flag, given its option string; an empty
            answer for flags it knows nothing about. Asked about unknown flags alone; must not import torch.
        session: ``"module:Class"``, a subclass of ``Session`` with functions of the host's own.
        never_calls: stages the host has no place for. A feature that takes part in nothing else is refused.
        on_demand: ``"module:function"`` that names further patches for listings, given the stages that active
            features implement and the kinds of the platform; must not import torch. A host that lives in
            foreign code applies them when it opens a session.
        doctor: ``"module:function"`` that looks for what the host needs beside the core; called without
            arguments, it returns `Finding` records; must not import torch.
        notes: ``"module:function"`` that returns what a user should know about the arguments, one sentence
            each; printed like `Feature.notes`. Must not import torch.
        completes: ``"module:function"`` that completes arguments before the plan is made, called with the
            arguments, the mapping of their provenance, and a function that says whether an installed feature
            declares an option with a value. It changes the first two and returns a `FlagNote` on each flag
            that it left out. Must not import torch.
        infers: ``"module:function"`` that settles arguments in mode ``inference`` before the plan is made,
            called with the arguments and the mapping of their provenance. It changes both and returns a
            `FlagNote` on each flag that only a training acts on. Must not import torch.
        stand_downs: ``"module:function"`` that is called with the arguments, the option strings that active
            features declare and the kinds of the platform. It sets what the host cannot act on, and what
            changes nothing, to its default, and returns a `FlagNote` on each. Must not import torch.
        commands: sub-commands of ``mindspeed-train``, click commands by name: ``("module:command", help)``.
    """

    name: str
    summary: str
    flags: str
    stages: tuple[str, ...]
    train: str = ""
    patches: tuple[Patch, ...] = ()
    absent: str = ""
    session: str = ""
    never_calls: tuple[str, ...] = ()
    on_demand: str = ""
    doctor: str = ""
    notes: str = ""
    completes: str = ""
    infers: str = ""
    stand_downs: str = ""
    commands: Mapping[str, tuple[str, str]] = field(default_factory=dict, hash=False)
