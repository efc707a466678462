"""The checkpoint that a run saved last, noted in its folder: for the last line of a job, and the next start.

Without torch: a supervisor reads it after its workers were killed.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mindspeed_core.cli.commands import TRAIN_PROGRAM

FILE = "last_save.json"
_OF_A_START = {
    **dict.fromkeys(("--load", "--ckpt-step", "--run-dir"), 1),
    **dict.fromkeys(("--finetune", "--no-load-optim", "--no-load-rng"), 0),
}
"""Options about where a run begins, each with the number of its values: it begins elsewhere the next time."""


@dataclass
class CommandLine:
    """Command line of a run, without the program's name; empty where another program trains."""

    arguments: tuple[str, ...] = ()


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


def way_on(arguments: Sequence[str], save: LastSave | None, run_dir: str | Path | None) -> str:
    """Return the command that goes on with a run; empty where nothing is saved.

    Args:
        arguments: the command line of the run, without the program's name.
        save: the checkpoint that the run saved, or began from.
        run_dir: its folder, whose records go on too.
    """
    if save is None or not arguments:
        return ""
    root, given = save.checkpoint.rpartition("/")[0], _value(arguments, "--save")
    folder = ["--run-dir", str(run_dir)] if run_dir else []
    if not given or os.path.abspath(given) != os.path.abspath(root):
        # Nothing is saved since it began: it begins there again.
        return shlex.join([TRAIN_PROGRAM, *_without(arguments, {"--run-dir": 1}), *folder])
    return shlex.join([TRAIN_PROGRAM, *_without(arguments, _OF_A_START), "--load", given, *folder])


def last_words(run_dir: str | None, arguments: Sequence[str] = ()) -> str:
    """Return the last lines of a job for its supervisor; empty where the run never began.

    Args:
        run_dir: the run's folder.
        arguments: the job's command line, without the program's name.
    """
    if not run_dir or not Path(run_dir).is_dir():
        return ""
    save = read(Path(run_dir))
    command = way_on(arguments, save, run_dir)
    return "\n".join([*([f"go on with\n    -> {command}"] if command else []), sentence(save, run_dir)])


def _value(arguments: Sequence[str], option: str) -> str:
    """Return the value of an option on a command line; empty where it is not given."""
    found = ""
    for word, following in zip(arguments, (*arguments[1:], "")):
        name, equals, value = word.partition("=")
        if name == option:
            found = value if equals else following
    return found


def _without(arguments: Sequence[str], options: Mapping[str, int]) -> list[str]:
    """Return a command line without some options, each with the number of its values."""
    kept: list[str] = []
    skipped = 0
    for word in arguments:
        name, equals, _ = word.partition("=")
        if skipped:
            skipped -= 1
        elif name in options:
            skipped = 0 if equals else options[name]
        else:
            kept.append(word)
    return kept
