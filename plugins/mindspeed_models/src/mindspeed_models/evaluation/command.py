"""``mindspeed-models evaluate``: benchmarks on local files, with a table, JSON and a log of questions."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from mindspeed_core.errors import ArgumentError, UserError
from mindspeed_core.terminal.foreign_text import emit, first_line
from mindspeed_core.terminal.program import run_program
from mindspeed_models.evaluation.items import Scoring, TaskOptions
from mindspeed_models.evaluation.tasks import TASKS, data_paths, task_named
from mindspeed_models.serving.model_options import ModelOptions, layout_command, model_of, model_options

if TYPE_CHECKING:
    from mindspeed_models.evaluation.items import Questions
    from mindspeed_models.inference.loaded import LoadedModel

SEED_SCRIPT = "evaluation_llama.py"
_PATHS = "--task-data-path"
_LISTS = ("--task", _PATHS)
_POSITIVE = click.IntRange(1)


@dataclass(frozen=True)
class Evaluation:
    """An evaluation.

    Attributes:
        tasks: names.
        paths: of their data, as on the command line.
        options: of all tasks.
        output: folder of results; None prints them alone.
        batch_tokens: tokens computed together at most.
        seed: of drawn answers.
        temperature: of several answers to one question.
        execute: run programs that the model wrote.
        quiet: print the table alone.
    """

    tasks: tuple[str, ...]
    paths: tuple[str, ...]
    options: TaskOptions
    output: Path | None = None
    batch_tokens: int = 16384
    seed: int = 0
    temperature: float = 0.0
    execute: bool = False
    quiet: bool = False


def spread(words: Sequence[str]) -> list[str]:
    """Return a command line in which ``--task`` and ``--task-data-path`` stand before each of their words.

    They take all words up to the next flag, as in AscendSpeed's script; an option of click takes one.
    """
    found: list[str] = []
    flag: str | None = None
    for word in words:
        if word.startswith("-"):
            name, equals, _ = word.partition("=")
            flag = name if name in _LISTS else None
            if flag is None or equals:
                found.append(word)
        elif flag is None:
            found.append(word)
        else:
            found += [flag, word]
    return found


@layout_command("evaluate", "Seven benchmarks on local files.", spread)
@model_options
@click.option(
    "--task",
    "tasks",
    multiple=True,
    metavar="NAME...",
    help=f"Tasks: {', '.join(TASKS)}; several may follow.",
)
@click.option(
    _PATHS,
    "paths",
    multiple=True,
    metavar="PATH...",
    help="Folder or file of a task's data, as NAME=PATH or with the name in it; several may follow.",
)
@click.option(
    "--output", type=click.Path(path_type=Path), help="Folder of results; it goes on where it stopped."
)
@click.option("--limit", type=_POSITIVE, help="Most questions of each subject.")
@click.option(
    "--scoring",
    type=click.Choice(("standard", "seed")),
    default="standard",
    show_default=True,
    help="Rules of judgement; seed are those of AscendSpeed.",
)
@click.option(
    "--split", default="", help="Part of the data, such as val, dev or test; the task's by default."
)
@click.option(
    "--few-shot", "shots", type=click.IntRange(0), help="Examples in a prompt; the task's by default."
)
@click.option("--max-new-tokens", "new_tokens", type=_POSITIVE, help="Longest generated answer.")
@click.option("--chain-of-thought", "reasoning", is_flag=True, help="Ask bbh for its reasoning, too.")
@click.option(
    "--samples", type=_POSITIVE, default=1, show_default=True, help="Answers to each question of human_eval."
)
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    default=0.8,
    show_default=True,
    help="Temperature of several answers.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of drawn answers.")
@click.option(
    "--batch-tokens",
    type=_POSITIVE,
    default=16384,
    show_default=True,
    help="Tokens computed together at most.",
)
@click.option(
    "--allow-code-execution", "execute", is_flag=True, help="Run the programs of human_eval in a sandbox."
)
@click.option("--quiet", is_flag=True, help="Print the table alone.")
def evaluate_command(**given: Any) -> int:
    """Evaluate a model. Nothing is downloaded: each task reads its files from --task-data-path.

    FLAGS are further flags of the host. Exit status: 0 done, 1 not, or with questions that got no answer.
    """
    evaluation = Evaluation(
        tasks=given["tasks"],
        paths=given["paths"],
        options=TaskOptions(
            scoring=cast(Scoring, given["scoring"]),
            shots=given["shots"],
            split=given["split"],
            new_tokens=given["new_tokens"],
            limit=given["limit"],
            reasoning=given["reasoning"],
            samples=given["samples"],
        ),
        output=given["output"],
        batch_tokens=given["batch_tokens"],
        seed=given["seed"],
        temperature=given["temperature"],
        execute=given["execute"],
        quiet=given["quiet"],
    )
    return run_evaluation(model_of(given), evaluation)


def main_of_seed(argv: Sequence[str] | None = None) -> int:
    """Run by the name, the flags and the rules of AscendSpeed's script; returns the exit status."""
    given = sys.argv[1:] if argv is None else list(argv)
    # Its launcher adds the number of the process, which the environment says, too.
    words = [word for word in given if word.partition("=")[0] not in ("--local-rank", "--local_rank")]
    named = any(word.partition("=")[0] == "--scoring" for word in words)
    return run_program(evaluate_command, words if named else ["--scoring", "seed", *words], SEED_SCRIPT)


def run_evaluation(options: ModelOptions, evaluation: Evaluation) -> int:
    """Evaluate on all ranks; returns the exit status.

    Raises:
        UserError: a task, a file or a flag is wrong; that is said before the model is loaded.
    """
    from mindspeed_models.evaluation.engine import check_engine
    from mindspeed_models.serving.serve_command import signals_ignored

    asked = questions_of(evaluation)
    check_engine()
    with options.open() as model:
        if not model.leader:
            with signals_ignored():
                model.follow()
            return 0
        return report(model, options, evaluation, asked)


def questions_of(evaluation: Evaluation) -> list[Questions]:
    """Read the questions of all tasks.

    Raises:
        UserError: a task, a file or a flag is wrong.
    """
    from mindspeed_models.evaluation.engine import load_questions, with_runner

    if not evaluation.tasks:
        raise ArgumentError("--task", None, "no task is named", f"use {', '.join(TASKS)}")
    options = evaluation.options
    if evaluation.execute:
        from mindspeed_models.sandbox.run import Sandbox

        sandbox = Sandbox()

        def run(program: str) -> tuple[bool, str]:
            outcome = sandbox.run(program)
            return outcome.passed, outcome.reason

        options = with_runner(options, run)
    tasks = [task_named(name) for name in evaluation.tasks]
    paths = data_paths(list(evaluation.tasks), list(evaluation.paths))
    found = []
    for task in tasks:
        if options.split and options.split not in task.splits:
            raise ArgumentError(
                "--split", options.split, f"{task.name} has no such part", f"use {' or '.join(task.splits)}"
            )
        own = replace(options, warn=_warn)
        if task.name != "human_eval":
            own = replace(own, samples=1)
        found.append(load_questions(task, paths[task.name], own))
    return found


def report(
    model: LoadedModel, options: ModelOptions, evaluation: Evaluation, asked: Sequence[Questions]
) -> int:
    """Ask the leader's model, print and write the results; returns the exit status."""
    from mindspeed_models.evaluation.answers import AnswerLog
    from mindspeed_models.evaluation.engine import evaluate
    from mindspeed_models.evaluation.results import table, write

    identity = model_identity(options)
    output = evaluation.output
    if output is not None:
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArgumentError("--output", str(output), first_line(error), "name a folder") from error
    with AnswerLog(output / "answers.jsonl" if output else None, identity) as log:
        if log.resumed and not evaluation.quiet:
            emit(f"{log.resumed} answers are there from before", err=True)
        results = evaluate(
            model,
            options.prompts(model),
            asked,
            log,
            batch_tokens=evaluation.batch_tokens,
            seed=evaluation.seed,
            temperature=evaluation.temperature if evaluation.options.samples > 1 else 0.0,
            say=None if evaluation.quiet else lambda text: emit(text, err=True),
        )
    emit(table(results))
    if output is not None:
        write(output, results, model=options.load, identity=identity)
        emit(f"written to {output}")
    failed = [sample for result in results for sample in result.samples if sample.error is not None]
    if failed:
        first = failed[0]
        emit(
            f"error: {len(failed)} questions got no answer and count as wrong, the first {first.item.key}: "
            f"{first.error}",
            err=True,
        )
    return 1 if failed else 0


def model_identity(options: ModelOptions) -> str:
    """Return a digest of a model's files by name, size and time, and of the flags that change its answers."""
    digest = hashlib.sha256()
    for folder in (options.load, *options.lora):
        path = Path(folder)
        files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
        for file in files:
            try:
                facts = file.stat()
            except OSError as error:
                raise UserError(f"--load {file}: {first_line(error)}") from error
            digest.update(f"{file.relative_to(path)}:{facts.st_size}:{facts.st_mtime_ns}\0".encode())
    digest.update("\0".join(options.flags).encode())
    return f"{Path(options.load).resolve().name} {digest.hexdigest()[:16]}"


def _warn(text: str) -> None:
    emit(f"warning: {text}", err=True)
