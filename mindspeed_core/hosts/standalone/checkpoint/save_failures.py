"""What a save that failed does to the run: with ``--on-save-failure continue`` it costs a checkpoint only.

A save fails on all ranks or on none, and leaves earlier checkpoints as they were; so training can go on. The
last save of a run is not spared: without it the run's end would be lost in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mindspeed_core.errors import CheckpointError

if TYPE_CHECKING:
    from mindspeed_core.run import Run

SPARED = ("interval", "rampup")


@contextmanager
def tolerated(run: Run, say: Callable[[str], None], reason: str = "interval") -> Iterator[None]:
    """Let a save fail, if the arguments say so.

    Args:
        run: the run.
        say: told about the failure that is tolerated.
        reason: of the save, in the words of the stage ``save_checkpoint``.
    """
    try:
        yield
    except CheckpointError as error:
        if run.args.on_save_failure != "continue" or reason not in SPARED:
            raise
        say(f"not saved after step {run.iteration}, training goes on: {error}")
