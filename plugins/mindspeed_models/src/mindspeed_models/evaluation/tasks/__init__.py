"""The seven benchmarks: how each reads its files, asks, and judges."""

from __future__ import annotations

from pathlib import Path

from mindspeed_core.errors import ArgumentError, guess
from mindspeed_models.evaluation.items import Task
from mindspeed_models.evaluation.tasks import agieval, bbh, boolq, ceval, gsm8k, human_eval, mmlu

TASKS: dict[str, Task] = {
    module.TASK.name: module.TASK for module in (boolq, mmlu, gsm8k, human_eval, agieval, bbh, ceval)
}


def task_named(name: str) -> Task:
    """Return a benchmark.

    Raises:
        ArgumentError: there is none of that name; the nearest is named.
    """
    if name not in TASKS:
        raise ArgumentError(
            "--task", name, f"there is no such task{guess(name, TASKS)}", f"use {', '.join(TASKS)}"
        )
    return TASKS[name]


def data_paths(tasks: list[str], given: list[str]) -> dict[str, Path]:
    """Return the folder or file of each task.

    Args:
        tasks: names.
        given: ``task=path``, or paths of which one part is a task's name; one path for one task.

    Raises:
        ArgumentError: a task has none, or several.
    """
    flag = "--task-data-path"
    named: dict[str, Path] = {}
    others: list[Path] = []
    for text in given:
        name, equals, rest = text.partition("=")
        if equals and name in TASKS:
            if name not in tasks:
                raise ArgumentError(
                    flag, text, f"{name} is not evaluated", f"add it to --task, or drop {text}"
                )
            if name in named:
                raise ArgumentError(flag, text, f"{name} has a path already", "name each once")
            named[name] = Path(rest)
        else:
            others.append(Path(text))
    for name in tasks:
        if name in named:
            continue
        spelled = [path for path in others if any(name in part.lower() for part in path.parts)]
        found = spelled or (others if len(tasks) == len(given) == 1 else [])
        if len(found) != 1:
            reason = f"no path is {name}'s" if not found else f"{len(found)} paths could be {name}'s"
            raise ArgumentError(flag, " ".join(given) or None, reason, f"write {name}=PATH")
        named[name] = found[0]
    return named
