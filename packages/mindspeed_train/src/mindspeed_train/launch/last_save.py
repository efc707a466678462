"""The checkpoint that a run saved last, noted in its folder: for the last line of a job, and the next start.

Without torch: a supervisor reads it after its workers were killed.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = "last_save.json"


@dataclass(frozen=True)
class LastSave:
    """A published checkpoint.

    Attributes:
        step: training steps done.
        checkpoint: its folder or URL.
    """

    step: int
    checkpoint: str


def write(run_dir: Path, save: LastSave) -> None:
    """Note a checkpoint in the folder of its run.

    Raises:
        OSError: the folder cannot be written to.
    """
    beside = run_dir / f"{FILE}.tmp"
    beside.write_text(json.dumps(asdict(save)) + "\n", encoding="utf-8")
    os.replace(beside, run_dir / FILE)


def read(run_dir: Path) -> LastSave | None:
    """Return what a run saved last; None where it saved nothing, or the note cannot be read."""
    try:
        written = json.loads((run_dir / FILE).read_text(encoding="utf-8"))
        step, checkpoint = written["step"], written["checkpoint"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if type(step) is not int or not isinstance(checkpoint, str):
        return None
    return LastSave(step, checkpoint)


def sentence(save: LastSave | None, run_dir: str | Path | None) -> str:
    """Return the last line of a run: what is saved, and where its files are."""
    saved = "nothing is saved" if save is None else f"last saved: step {save.step} in {save.checkpoint}"
    return f"{saved}; run folder: {run_dir}" if run_dir else saved


def last_words(run_dir: str | None) -> str:
    """Return the last line of a job for its supervisor; empty where the run never began."""
    if not run_dir or not Path(run_dir).is_dir():
        return ""
    return sentence(read(Path(run_dir)), run_dir)
