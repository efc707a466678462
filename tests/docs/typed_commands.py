"""Commands of the documentation, made small and typed as a user would type them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from markdown_files import commands, read

SMALLER = {
    "--num-layers": "2",
    "--hidden-size": "32",
    "--num-attention-heads": "4",
    "--seq-length": "32",
    "--micro-batch-size": "1",
    "--global-batch-size": "2",
    "--train-iters": "2",
    "--save-interval": "2",
    "--lr-warmup-iters": "1",
    "--exit-interval": "1",
    "--vocab-size": "300",
}


def typed(command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command as a shell would find it, with the programs installed beside this Python."""
    program, *arguments = shlex.split(command)
    return subprocess.run(
        [str(Path(sys.executable).with_name(program)), *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MINDSPEED_CURVES": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )


def smaller(command: str) -> str:
    """The command with tiny sizes, one batch where it would evaluate on a hundred, on any machine's CPU."""
    words = shlex.split(command)
    for option, value in SMALLER.items():
        if option in words:
            words[words.index(option) + 1] = value
    if "--train-iters" in words:
        words += ["--platform", "cpu"]
        words += [] if "--eval-iters" in words else ["--eval-iters", "1"]
    return shlex.join(words)


def documented(document: str, beginning: str) -> str:
    """The one command of a document that begins so."""
    (found,) = (command for command in commands(read(document)) if command.startswith(beginning))
    return found
