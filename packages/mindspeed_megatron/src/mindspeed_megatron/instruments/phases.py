"""The phases of a run whose bytes are told apart: built, forward and backward, update. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mindspeed_core.feature import hookimpl

if TYPE_CHECKING:
    from mindspeed_core.hooks import Done
    from mindspeed_core.run import OptimizerStep, Run, StepResult
    from mindspeed_megatron.instruments.storage import StorageTracker

BUILD = "build"
FORWARD_BACKWARD = "forward and backward"
UPDATE = "update"
PHASES = (BUILD, FORWARD_BACKWARD, UPDATE)


class StoragePhases:
    """Divides a run into `PHASES` at its stages; an extra plugin of a session.

    Attributes:
        storage: the tracker.
    """

    storage: StorageTracker

    def __init__(self, storage: StorageTracker) -> None:
        """Divide what this tracker follows."""
        self.storage = storage

    @hookimpl(wrapper=True)
    def start_run(self, run: Run) -> Iterator[None]:
        """End the building."""
        self.storage.mark_run(run)
        self.storage.end_phase()
        result: Done = yield  # type: ignore[assignment]
        return result  # type: ignore[return-value]

    @hookimpl(wrapper=True)
    def train_step(self, run: Run) -> Iterator[None]:
        """Begin with forward and backward, and end the update."""
        self.storage.phase(FORWARD_BACKWARD)
        result: StepResult = yield  # type: ignore[assignment]
        self.storage.mark_run(run)
        self.storage.end_phase()
        return result  # type: ignore[return-value]

    @hookimpl(wrapper=True)
    def optimizer_step(self, run: Run) -> Iterator[None]:
        """End forward and backward, and begin the update."""
        self.storage.mark_run(run)
        self.storage.phase(UPDATE)
        result: OptimizerStep = yield  # type: ignore[assignment]
        return result  # type: ignore[return-value]
