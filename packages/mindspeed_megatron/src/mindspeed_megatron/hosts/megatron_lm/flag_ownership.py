"""Flags that a feature takes over from Megatron-LM, whose own code for them must not run beside it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mindspeed_megatron.brought_choices import STAND_INS, bringing

if TYPE_CHECKING:
    from mindspeed_core.run import Run
    from mindspeed_core.session import Session

CLAIMABLE: Mapping[str, tuple[str, Any]] = {
    "--profile": ("profile", False),
    "--record-memory-history": ("record_memory_history", False),
    "--log-memory-interval": ("log_memory_interval", None),
    "--log-device-memory-used": ("log_device_memory_used", False),
}
"""Flags whose code is in Megatron-LM's loop: the argument, and the value that keeps that code still."""


class SeenByFeatures(Namespace):
    """Megatron-LM's arguments as they were given: what it must not see itself is kept here."""

    def __init__(self, args: Namespace, kept: Mapping[str, Any]) -> None:
        """Look through to ``args`` for everything but ``kept``."""
        object.__setattr__(self, "_args", args)
        vars(self).update(kept)

    def __getattr__(self, name: str) -> Any:
        """Return an argument that is not kept here."""
        return getattr(vars(self)["_args"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an argument where it lives."""
        if name in vars(self):
            vars(self)[name] = value
        else:
            setattr(vars(self)["_args"], name, value)


def _keeps(args: Namespace, dest: str) -> bool:
    return isinstance(args, SeenByFeatures) and dest in vars(args)


def stand_in(session: Session) -> None:
    """Show Megatron-LM a value that it knows where a feature brings the one that was given."""
    args, kept = session.args, {}
    for option, (dest, value) in STAND_INS.items():
        if not _keeps(args, dest) and bringing(session, option):
            kept[dest] = getattr(args, dest)
            setattr(args, dest, value)
    if kept:
        session.args = SeenByFeatures(args, kept)


@contextmanager
def standing_in(session: Session, args: Namespace) -> Iterator[None]:
    """Show Megatron-LM's validation, in this block, values that it knows.

    What it demands of a choice of its own, a feature of the same name need not: its Muon excludes the
    distributed optimizer.
    """
    kept = {dest: getattr(args, dest) for option, (dest, _) in STAND_INS.items() if bringing(session, option)}
    for dest, value in STAND_INS.values():
        if dest in kept:
            setattr(args, dest, value)
    try:
        yield
    finally:
        for dest, value in kept.items():
            setattr(args, dest, value)


def still_values(session: Session) -> dict[str, Any]:
    """Return the arguments of flags that features claim, with the values that keep Megatron-LM still."""
    return {dest: still for option, (dest, still) in CLAIMABLE.items() if session.claims(option)}


def leave_to_features(session: Session, run: Run) -> None:
    """Switch off what Megatron-LM's loop would do for a flag that an active feature declares."""
    args, kept = session.args, {}
    for option, (dest, still) in CLAIMABLE.items():
        if not _keeps(args, dest) and session.claims(option) and getattr(args, dest, still) != still:
            kept[dest] = getattr(args, dest)
            setattr(args, dest, still)
    if kept:
        session.args = run.args = SeenByFeatures(args, kept)
