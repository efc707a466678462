"""Training commands as people start them: what runs, with which flags, in how many processes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mindspeed_core.errors import UserError

TRAIN, MODULE, SCRIPT = "train", "module", "script"
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_TRAIN_MODULES = ("mindspeed_core.train", "mindspeed_train.program")
_SWITCHES = frozenset({"standalone", "no-python", "run-path", "no_python", "run_path"})
_SHELLS = ("bash", "sh", "zsh")


@dataclass(frozen=True)
class LaunchCommand:
    """A training command.

    Attributes:
        kind: ``train`` for mindspeed-train, ``module`` or ``script`` for Python code.
        target: the module or the script; empty for ``train``.
        arguments: its own, without those of the launcher and of dry runs.
        world_size: ranks, as the launcher or ``--fake-world-size`` says; 1 where neither does.
        ranks_per_node: as the launcher says; None where it does not.
        environment: variables that stand before the command.
        text: the command as given.
    """

    kind: str
    target: str
    arguments: tuple[str, ...]
    world_size: int
    ranks_per_node: int | None
    environment: Mapping[str, str] = field(default_factory=dict)
    text: tuple[str, ...] = ()


def read_command(words: Sequence[str], environment: Mapping[str, str] | None = None) -> LaunchCommand:
    """Read a training command.

    Args:
        words: of the command, as a shell would pass them on.
        environment: whose ``WORLD_SIZE`` counts where no launcher says how many; of the process by default.

    Raises:
        UserError: it is no command that can be planned, or says two numbers of ranks.
    """
    env = os.environ if environment is None else environment
    rest = list(words)
    given: dict[str, str] = {}
    while rest and _ASSIGNMENT.match(rest[0]):
        name, _, value = rest.pop(0).partition("=")
        given[name] = value
    if not rest:
        raise UserError(
            "there is no command to plan; write it behind --: mindspeed-tune plan -- mindspeed-train FLAGS"
        )
    nodes = per_node = tasks = None
    program = os.path.basename(rest[0])
    if program == "srun":
        rest, tasks, nodes, per_node = _srun(rest[1:])
        program = os.path.basename(rest[0]) if rest else ""
    if _is_torchrun(rest):
        rest, nodes, per_node = _torchrun(rest[1:] if program == "torchrun" else _after_module(rest))
        kind, target, arguments = _python(rest)
    elif program.startswith("python"):
        kind, target, arguments = _python(rest[1:])
    elif program == "mindspeed-train":
        kind, target, arguments = TRAIN, "", rest[1:]
    elif rest and rest[0].startswith("--"):
        kind, target, arguments = TRAIN, "", rest
    elif program.endswith(".py"):
        kind, target, arguments = SCRIPT, rest[0], rest[1:]
    else:
        problem = "a shell script hides its command" if program in _SHELLS else "is no training command"
        raise UserError(
            f"{rest[0] if rest else 'srun'}: {problem}; give mindspeed-train FLAGS, torchrun … SCRIPT FLAGS, "
            "python SCRIPT FLAGS, or the flags alone"
        )
    if kind == TRAIN:
        arguments, processes = _taken(arguments, "--nproc")
        arguments, _ = _taken(arguments, "--max-restarts")
        if processes is not None:
            per_node = _number("--nproc", processes)
            nodes = nodes or 1
    arguments, planned = _taken(arguments, "--fake-world-size")
    arguments, rank = _taken(arguments, "--fake-rank")
    if rank is not None:
        raise UserError(
            f"--fake-rank {rank} makes a run that one rank; a plan chooses its ranks: use --plan-ranks {rank}"
        )
    launched = tasks if tasks is not None else nodes * per_node if nodes and per_node else None
    return LaunchCommand(
        kind,
        target,
        tuple(arguments),
        _world_size(planned, launched, {**env, **given}),
        per_node,
        given,
        tuple(words),
    )


def _world_size(planned: str | None, launched: int | None, env: Mapping[str, str]) -> int:
    asked = None if planned is None else _number("--fake-world-size", planned)
    variable = env.get("WORLD_SIZE", "")
    set_outside = _number("WORLD_SIZE", variable) if variable else None
    said = {
        "--fake-world-size": asked,
        "the launcher": launched,
        "the variable WORLD_SIZE": set_outside if launched is None else None,
    }
    known = {who: number for who, number in said.items() if number is not None}
    if len(set(known.values())) > 1:
        (first, one), (second, other) = list(known.items())[:2]
        raise UserError(
            f"{first} says {one} ranks and {second} says {other}; leave one of them out, or let them agree"
        )
    return next(iter(known.values()), 1)


def _is_torchrun(words: Sequence[str]) -> bool:
    if not words:
        return False
    program = os.path.basename(words[0])
    return program == "torchrun" or (program.startswith("python") and bool(_after_module(words)))


def _after_module(words: Sequence[str]) -> list[str]:
    """Return what follows ``-m torch.distributed.run``; nothing where another module runs."""
    for index, word in enumerate(words[1:-1], start=1):
        if word == "-m":
            found = words[index + 1] in ("torch.distributed.run", "torch.distributed.launch")
            return list(words[index + 2 :]) if found else []
        if not word.startswith("-"):
            return []
    return []


def _torchrun(words: Sequence[str]) -> tuple[list[str], int, int | None]:
    """Return what torchrun starts, the nodes, and the processes of each."""
    nodes, per_node = 1, None
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "--module"):
        name, equals, value = rest.pop(0).lstrip("-").partition("=")
        if name in _SWITCHES:
            continue
        if not equals:
            if not rest:
                raise UserError(f"torchrun's --{name} has no value, and nothing follows it")
            value = rest.pop(0)
        name = name.replace("_", "-")
        if name == "nnodes":
            # An elastic launch, MIN:MAX, is planned at its largest.
            nodes = _number("--nnodes", value.rpartition(":")[2])
        elif name == "nproc-per-node":
            per_node = _number("--nproc-per-node", value)
    if rest and rest[0] == "--module":
        rest[0] = "-m"
    return rest, nodes, per_node or 1


def _srun(words: Sequence[str]) -> tuple[list[str], int | None, int | None, int | None]:
    tasks = nodes = per_node = None
    rest = list(words)
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).partition("=")
        if not equals and rest and not rest[0].startswith("-") and name not in ("-l", "-u", "--exclusive"):
            value = rest.pop(0)
        if name in ("-n", "--ntasks"):
            tasks = _number(name, value)
        elif name in ("-N", "--nodes"):
            nodes = _number(name, value)
        elif name == "--ntasks-per-node":
            per_node = _number(name, value)
    return rest, tasks, nodes, per_node


def _python(words: Sequence[str]) -> tuple[str, str, list[str]]:
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        rest.pop(0)
    if len(rest) > 1 and rest[0] == "-m":
        if rest[1] in _TRAIN_MODULES:
            return TRAIN, "", rest[2:]
        return MODULE, rest[1], rest[2:]
    if not rest:
        raise UserError("the launcher starts nothing: a script or -m MODULE is missing")
    return SCRIPT, rest[0], rest[1:]


def _taken(arguments: Sequence[str], name: str) -> tuple[list[str], str | None]:
    """Return arguments without a flag, and its value; None where it is not given."""
    kept: list[str] = []
    value: str | None = None
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word == name:
            if not rest:
                raise UserError(f"{name} has no value")
            value = rest.pop(0)
        elif word.startswith(name + "="):
            value = word.partition("=")[2]
        else:
            kept.append(word)
    return kept, value


def _number(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"{name} {text}: give a number of processes, 1 or more")
    return int(text)
