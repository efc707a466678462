"""Versions of the hook interface, ``MAJOR.MINOR``, apart from the version of the distribution.

Within a major version stages and arguments are only added.
"""

from __future__ import annotations

import re

from mindspeed_core.errors import DeclarationError

API_VERSION = "1.3"
"""Raised in its minor part when a stage or an argument is added, in its major part when one goes."""

_VERSION = re.compile(r"(\d+)\.(\d+)\Z")


def parsed(version: str) -> tuple[int, int]:
    """Return a version as numbers.

    Raises:
        DeclarationError: it is not of the form ``MAJOR.MINOR``.
    """
    match = _VERSION.match(version)
    if match is None:
        raise DeclarationError(f"hook interface {version!r}: write MAJOR.MINOR, for instance {API_VERSION!r}")
    return int(match[1]), int(match[2])


def refusal(stated: str, present: str = API_VERSION) -> tuple[str, str] | None:
    """Return why a plugin cannot work with this core, and what to do; None when it can.

    Args:
        stated: the version of the interface that the plugin was written for.
        present: the version that this core has.

    Raises:
        DeclarationError: ``stated`` is no version.
    """
    theirs, ours = parsed(stated), parsed(present)
    why = f"it was written for hook interface {stated}, this mindspeed-core has {present}"
    if theirs > ours:
        return why, "pip install --upgrade mindspeed-core, or install an older version of the plugin"
    if theirs[0] < ours[0]:
        return why, "install a newer version of the plugin, or an older mindspeed-core"
    return None
