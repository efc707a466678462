"""Validity of candidates: what `mindspeed_core.check` says, and nothing else."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from mindspeed_core import Checked, Plan, check
from mindspeed_core.flags.flag_set import known_flags
from mindspeed_core.registry import Registry
from mindspeed_tune.candidate import Candidate
from mindspeed_tune.launch_command import TRAIN, LaunchCommand

_NUMBER = re.compile(r"\d+(\.\d+)?")


@dataclass
class Refused:
    """Candidates that are refused for one reason.

    Attributes:
        reason: in the words of the first of them.
        count: how many.
        example: the first of them.
    """

    reason: str
    count: int
    example: str


@dataclass
class Validity:
    """Asks whether candidates of a command may start, and remembers why not.

    Attributes:
        registry: what is installed.
        command: the user's.
        platform: that is planned for.
        refused: by the shape of the reason.
    """

    registry: Registry
    command: LaunchCommand
    platform: str
    refused: dict[str, Refused] = field(default_factory=dict)

    def args_of(self, candidate: Candidate) -> Any:
        """Return the validated arguments of a candidate; None, the reason remembered, where it is refused."""
        found = self._checked(candidate)
        if not found.ok:
            self.refuse(candidate, str(found.problems[0]))
        return found.args

    def plan_args(self, candidate: Candidate, world_size: int) -> Any:
        """Return the validated arguments of a candidate in another world; None where it is refused there."""
        return self._checked(candidate, world_size).args

    def plan_of(self, candidate: Candidate) -> Plan | None:
        """Return what would be active with a candidate; None where it may not start."""
        found = self._checked(candidate)
        return found.plan if found.ok else None

    def _checked(self, candidate: Candidate, world_size: int | None = None) -> Checked:
        flags = known_flags(self.registry)
        arguments = [*candidate.arguments(self.command.arguments, flags)]
        if self.command.kind != TRAIN:
            # A script may have flags of its own; its dry run is who refuses them.
            arguments.append("--ignore-unknown-args")
        return check(
            arguments,
            world_size=world_size or self.command.world_size,
            platform=self.platform,
            registry=self.registry,
        )

    def refuse(self, candidate: Candidate, reason: str) -> None:
        """Remember why a candidate is out of the question."""
        shape = _NUMBER.sub("#", reason.splitlines()[0])
        known = self.refused.setdefault(shape, Refused(reason, 0, candidate.name))
        known.count += 1
