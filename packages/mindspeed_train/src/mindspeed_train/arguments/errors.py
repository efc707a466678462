"""Errors about a flag, composed from the arguments."""

from __future__ import annotations

from argparse import Namespace

from mindspeed_core.errors import ArgumentError
from mindspeed_core.feature import dest_of


def option(dest: str) -> str:
    """Return the option string of an attribute of the arguments, ``--micro-batch-size``."""
    return "--" + dest.replace("_", "-")


def argument_error(args: Namespace, flag: str, reason: str, remedy: str) -> ArgumentError:
    """Make the error about a flag with the value it has; a switch is named without one.

    Args:
        args: parsed arguments.
        flag: the option string.
        reason: why its value cannot work.
        remedy: the way out.
    """
    value = getattr(args, dest_of(flag), None)
    if isinstance(value, (list, tuple)):
        value = " ".join(map(str, value))
    return ArgumentError(flag, None if isinstance(value, bool) else value, reason, remedy)
