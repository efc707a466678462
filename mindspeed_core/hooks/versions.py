"""Versions of the hook interface, and what changed between them.

The interface has a version of its own, ``MAJOR.MINOR``, apart from the version of the distribution. Within a
major version stages and arguments are only added; what is renamed or on its way out carries a `Change` and
keeps working, with one warning, until the next major version.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mindspeed_core.feature import DeclarationError

API_VERSION = "1.0"
"""Raised in its minor part when a stage or an argument is added, in its major part when one goes."""

_VERSION = re.compile(r"(\d+)\.(\d+)\Z")


class HookDeprecationWarning(FutureWarning):
    """A plugin uses a stage or argument that has another name now, or that the next major version lacks."""


def parsed(version: str) -> tuple[int, int]:
    """A version as numbers.

    Raises:
        DeclarationError: it is not of the form ``MAJOR.MINOR``.
    """
    match = _VERSION.match(version)
    if match is None:
        raise DeclarationError(f"hook interface {version!r}: write MAJOR.MINOR, for instance {API_VERSION!r}")
    return int(match[1]), int(match[2])


def refusal(stated: str, present: str = API_VERSION) -> tuple[str, str] | None:
    """Why a plugin cannot work with this core, and what to do; None when it can.

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


@dataclass(frozen=True)
class Change:
    """Something about a stage that older plugins spell otherwise, or that is going to go.

    A stage or argument that got its name in version ``since`` names its former one in ``was``; one that goes
    with the next major version says in ``instead`` what to use.

    Attributes:
        since: the version of the interface that brought the change.
        argument: the argument it is about, by its present name; empty for the stage itself.
        was: the former name.
        instead: what to use instead of something that goes.
    """

    since: str
    argument: str = ""
    was: str = ""
    instead: str = ""

    def __post_init__(self) -> None:
        parsed(self.since)
        if bool(self.was) == bool(self.instead):
            raise DeclarationError("a change of a stage gives exactly one of was, instead")

    def told(self, stage: str) -> str:
        """The change as a sentence.

        Args:
            stage: the stage's present name.
        """
        goes = parsed(self.since)[0] + 1
        what = f"argument {self.argument!r} of stage {stage!r}" if self.argument else f"stage {stage!r}"
        if self.was:
            return (
                f"{what} was called {self.was!r} before version {self.since} of the hook interface; the old "
                f"name works until version {goes}.0"
            )
        return f"{what} goes with version {goes}.0 of the hook interface: {self.instead}"
