"""Names of saves in an object store: the step, when it began, and who writes it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone

from mindspeed_megatron.tracker import directory_name
from mindspeed_train.checkpoint import manifests, publish
from mindspeed_train.checkpoint.store_url import masked

TIME = "%Y%m%dT%H%M%S.%fZ"
SAVE = re.compile(r"(?P<time>\d{8}T\d{6}\.\d{6}Z)-(?P<owner>.+-\d+-\d+)\Z")


@dataclass(frozen=True)
class Step:
    """The objects of one step.

    Attributes:
        iteration: the step.
        files: ``{name: bytes}`` of objects directly under it.
        saves: names of the saves that have objects under it, published or not.
    """

    iteration: int
    files: Mapping[str, int]
    saves: tuple[str, ...]

    @property
    def name(self) -> str:
        """Return the name of its prefix."""
        return directory_name(self.iteration)

    @property
    def published(self) -> bool:
        """Return whether it has a manifest."""
        return manifests.MANIFEST in self.files


def owner(save: str) -> str:
    """Return the process that writes a save; empty for a name that is none."""
    match = SAVE.match(save)
    return match["owner"] if match else ""


def may_be_written(save: str) -> bool:
    """Return whether the run of a save may live."""
    match = SAVE.match(save)
    assert match is not None
    lives = publish.owner_lives(match["owner"])
    return publish.is_recent(started(save)) if lives is None else lives


def started(save: str) -> float:
    """Return when a save began, in seconds since the epoch."""
    return datetime.strptime(save.partition("-")[0], TIME).replace(tzinfo=timezone.utc).timestamp()


def reason_of(error: Exception) -> str:
    """Return the driver's reason for an error, its first line without secrets."""
    text = masked((str(error).splitlines() or [""])[0])
    if isinstance(error, FileNotFoundError):
        return f"does not exist ({text})"
    if isinstance(error, PermissionError):
        return f"no permission ({text})"
    return f"the store answered {type(error).__name__}: {text}"
