"""A step as a shell script, and as processes."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence

from mindspeed_core.terminal.foreign_text import emit
from mindspeed_models.running.steps import MODELS, TRAIN, Asked, Command

_MODULES = {MODELS: "mindspeed_models.program", TRAIN: "mindspeed_core.train"}


def words_of_command(command: Command, asked: Asked) -> list[str]:
    """Return a command line with its program, for this machine alone."""
    several = ("--nproc", str(asked.nproc)) if command.parallel and asked.nproc > 1 else ()
    if command.program == MODELS:
        # There each command has a flag of its own for it.
        name, *words = command.words
        return [command.program, name, *several, *words]
    return [command.program, *several, *command.words]


def script_of(commands: Sequence[Command], asked: Asked) -> str:
    """Return a shell script that does the same; on several machines each of them runs it."""
    lines = ["#!/usr/bin/env bash", "set -euo pipefail"]
    machines = asked.devices // asked.nproc
    if machines > 1 and any(command.parallel for command in commands):
        lines += [
            "# Each machine runs this script, with NODE_RANK from 0 and MASTER_ADDR that of the first.",
            ': "${NODE_RANK:?number of this machine}" "${MASTER_ADDR:?address of the first machine}"',
        ]
    for command in commands:
        if machines > 1 and command.parallel:
            begin = (
                f"torchrun --nnodes {machines} --nproc-per-node {asked.nproc} --node-rank "
                f'"$NODE_RANK" \\\n    --master-addr "$MASTER_ADDR" --master-port "${{MASTER_PORT:-6000}}" '
                f"-m {_MODULES[command.program]}"
            )
            lines.append(_wrapped(begin, command.words))
        else:
            program, *words = words_of_command(command, asked)
            lines.append(_wrapped(program, words))
    return "\n".join(lines) + "\n"


def _wrapped(begin: str, words: Sequence[str]) -> str:
    """Return a command with each flag and its values on a line."""
    rows: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--") and len(word) > 2:
            rows.append([])
        rows[-1].append(shlex.quote(word))
    head, *rest = rows
    return " \\\n    ".join([" ".join([begin, *head]), *(" ".join(row) for row in rest)])


def heading_of(command: Command) -> str:
    """Return the beginning of a command, up to the first thing that it names."""
    first, second, *_ = command.words
    named = 3 if second.startswith("--") and not first.startswith("--") else 2
    return f"{command.program} {' '.join(command.words[:named])} …"


def execute(commands: Sequence[Command], asked: Asked) -> int:
    """Run commands one after the other, each as a process below its heading on standard error.

    Return the first status that is not 0.
    """
    for command in commands:
        emit(heading_of(command), err=True)
        sys.stderr.flush()
        _, *words = words_of_command(command, asked)
        status = subprocess.run([sys.executable, "-m", _MODULES[command.program], *words]).returncode
        if status:
            # A signal ends a shell's command with 128 more than its number.
            return 128 - status if status < 0 else status
    return 0
