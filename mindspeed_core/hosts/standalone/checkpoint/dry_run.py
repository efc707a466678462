"""Checkpoints in a dry run: what this rank would read and write is counted, and no file is touched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mindspeed_core.instruments.kept_state import state_bytes
from mindspeed_core.run import LoadInfo, SaveInfo

if TYPE_CHECKING:
    from mindspeed_core.run import Run


@dataclass
class CheckpointBytes:
    """Bytes of this rank in checkpoints that a dry run left alone.

    Attributes:
        loaded: of the one that ``--load`` names; 0 without the flag.
        saved: of each one that ``--save`` would have made; 0 where none was due.
    """

    loaded: int = 0
    saved: int = 0


def not_read(run: Run) -> LoadInfo:
    """Count the bytes that this rank keeps of a checkpoint; the run begins at step 0."""
    if run.args.load:
        run.session.state(CheckpointBytes).loaded = _bytes(run)
    return LoadInfo(path=None)


def not_written(run: Run) -> SaveInfo:
    """Count the bytes that this rank would save."""
    saved = run.session.state(CheckpointBytes).saved = _bytes(run)
    path = f"nothing: {saved:,} bytes of this rank would go to {run.args.save}"
    return SaveInfo(path=path, iteration=run.iteration)


def _bytes(run: Run) -> int:
    kept = state_bytes(run)
    return kept["parameter_bytes"] + kept["optimizer_bytes"]
