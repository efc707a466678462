"""A candidate of a search with its numbers, and what the numbers of a search hold for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_tune.candidate import Candidate
from mindspeed_tune.estimate import PLANNED, Estimate
from mindspeed_tune.hardware import Hardware
from mindspeed_tune.launch_command import LaunchCommand
from mindspeed_tune.space_file import Space


@dataclass(frozen=True)
class Ranked:
    """A candidate with its numbers.

    Attributes:
        candidate: its settings.
        estimate: its best numbers: of its own dry run where it had one.
        composed: of the small pipeline, where it was composed.
    """

    candidate: Candidate
    estimate: Estimate
    composed: Estimate | None = None

    @property
    def planned(self) -> bool:
        """Return whether the numbers are those of its own dry run."""
        return self.estimate.source == PLANNED


def facts_of(command: LaunchCommand, hardware: Hardware, space: Space, platform: str) -> Mapping[str, Any]:
    """Return what the results of a journal hold for."""
    from importlib.metadata import version

    described = {name: value for name, value in vars(hardware).items() if name != "path"}
    return {
        "command": list(command.text),
        "ranks": command.world_size,
        "--tune-hardware": {key: value for key, value in described.items() if key != "sources"},
        "--tune-space": {"flags": dict(space.flags), "limits": dict(space.limits)},
        "--plan-target": platform,
        "versions": {name: version(name) for name in ("torch", "megatron-core", "mindspeed-core")},
    }
