"""Translation of each flag of a command line, and the command that starts the same training here."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_core.activation import plan_for
from mindspeed_core.discovery.host import DEFAULT_HOST
from mindspeed_core.flags.core import CORE_OWNER
from mindspeed_core.flags.flag_set import flag_set
from mindspeed_core.flags.notes import FlagNote
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError, Problem
from mindspeed_megatron.migrate.programs import WAY_OUT, other_model
from mindspeed_megatron.upstream.verdicts import NOTED, REFUSED, TRANSLATED, USED


@dataclass(frozen=True)
class FlagReport:
    """Translation of one flag.

    Attributes:
        flag: as it was given.
        verdict: ``used``, ``noted``, ``translated`` or ``refused``.
        text: who uses it, why it changes nothing, what is read instead, or why it is refused.
        remedy: the way out, for a refused flag.
        package: the distribution that uses it, or that has to be installed for it.
    """

    flag: str
    verdict: str
    text: str
    remedy: str = ""
    package: str = ""


@dataclass(frozen=True)
class Migration:
    """Translation of a command line.

    Attributes:
        flags: one report for each flag, in their order.
        problems: what is wrong with flags that are right by themselves.
        packages: distributions that the command needs beside the core.
        argv: the flags to give here.
    """

    flags: tuple[FlagReport, ...]
    problems: tuple[Problem, ...]
    packages: tuple[str, ...]
    argv: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Return whether the command starts as it is."""
        return not self.problems and all(flag.verdict != REFUSED for flag in self.flags)


def migration_of(
    words: Sequence[str], host: str, platform: str, registry: Registry, program: str = ""
) -> Migration:
    """Judge every flag of a command line.

    Args:
        words: the flags and their values.
        host: the host in which they are to be used.
        platform: the platform on which.
        registry: what is installed.
        program: the program that the words were for.

    Raises:
        mindspeed_core.registry.RegistryError: the host is not installed.
    """
    known = flag_set(registry, host)
    parsed = known.parse(words)
    notes = {note.flag: note for note in parsed.flag_notes}
    refused: dict[str, list[Problem]] = {}
    for problem in parsed.problems:
        refused.setdefault(problem.flag, []).append(problem)
    stood_down: dict[str, FlagNote] = {}
    problems: tuple[Problem, ...] = ()
    if not parsed.problems:
        try:
            plan, _ = plan_for(list(words), host=host, platform=platform, registry=registry)
            stood_down = {note.flag.partition(" ")[0]: note for note in plan.flag_notes}
        except PlanError as error:
            problems = error.problems
    found, packages = [], set[str]()
    if reason := other_model(program) if host == DEFAULT_HOST else "":
        found.append(FlagReport(program, REFUSED, reason, WAY_OUT))
    for given in known.given(words):
        option, shown = given.option, str(given)
        if option in refused:
            problem = refused[option][0]
            package = problem.remedy.removeprefix("pip install ").split(",")[0]
            package = package if problem.remedy.startswith("pip install ") else ""
            found.append(FlagReport(shown, REFUSED, problem.reason, problem.remedy, package))
            packages |= {package} - {""}
        elif shown in notes or (option in stood_down and option in known):
            note = notes.get(shown) or stood_down[option]
            text = f"{note.read_as}: {note.reason}".removesuffix(": ") if note.read_as else note.reason
            found.append(FlagReport(shown, TRANSLATED if note.read_as else NOTED, text))
        else:
            owner = known[option].owner if option in known else ""
            dist = registry.features[owner].dist if owner in registry.features else ""
            text = dist or ("the core" if owner == CORE_OWNER else owner)
            found.append(FlagReport(shown, USED, text, package=dist))
            packages |= {dist} - {""}
    return Migration(tuple(found), tuple(problems), tuple(sorted(packages)), parsed.argv)


def command_of(argv: Sequence[str], launcher: Sequence[str], program: str, host: str) -> tuple[str, ...]:
    """Return the command that starts the training: torchrun's options as they were, then the program.

    Args:
        argv: the flags to give.
        launcher: the words before the old program.
        program: the old program; Megatron-LM's scripts stay in its own host.
        host: the host.
    """
    words = [word for word in launcher if word not in ("nohup",)]
    options = words[1:]
    starter = words[0].rpartition("/")[2] if words else ""
    if starter.startswith("python"):
        # `python -m torch.distributed.launch` is torchrun; python alone starts one process.
        distributed = [w for w in options if w in ("torch.distributed.launch", "torch.distributed.run")]
        options = [w for w in options if w not in ("-m", "-u", *distributed)]
        words = ["torchrun", *options] if distributed else []
    own = ["-m", "mindspeed_core.train"] if words else ["mindspeed-train"]
    target = [program] if host == "megatron-lm" and program.endswith(".py") else own
    if target == [program] and not words:
        words = ["python"]
    return (*words, *target, *argv)


def shown_command(command: Sequence[str], expressions: Sequence[str] = ()) -> str:
    """Return a command over several lines, a flag and its values on each.

    Args:
        command: its words.
        expressions: what stands in them for the shell.
    """
    lines: list[list[str]] = [[]]
    for word in command:
        if word.startswith("--") and lines[-1]:
            lines.append([])
        lines[-1].append(word)
    return " \\\n  ".join(" ".join(quoted(word, expressions) for word in line) for line in lines)


def quoted(word: str, expressions: Sequence[str]) -> str:
    """Return a word for the shell, which replaces the expressions in it and nothing else."""
    if word in expressions:
        return word
    pattern = "|".join(re.escape(text) for text in sorted(expressions, key=len, reverse=True))
    parts = re.split(f"({pattern})", word) if pattern else [word]
    if len(parts) == 1:
        return shlex.quote(word)
    return "".join(f'"{part}"' if at % 2 else part and shlex.quote(part) for at, part in enumerate(parts))
