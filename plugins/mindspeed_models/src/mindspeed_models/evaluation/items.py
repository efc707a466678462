"""Questions of an evaluation and the answers to them: plain values without a model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Scoring = Literal["standard", "seed"]


@dataclass(frozen=True)
class Item:
    """One question.

    Attributes:
        subject: part of the task that it belongs to.
        number: its number in the file of the subject, from 0.
        context: the whole prompt, examples included.
        target: the right answer as text; empty where the file does not say it.
        choices: continuations whose log-likelihoods are compared; empty where text is generated.
        gold: number of the right choice; None where the file does not say it.
        last_token: of each choice only the last token counts, encoded alone.
        until: texts that end a generated answer.
        new_tokens: longest generated answer.
        shots: examples in the prompt.
        record: what else the score needs.
    """

    subject: str
    number: int
    context: str
    target: str
    choices: tuple[str, ...] = ()
    gold: int | None = None
    last_token: bool = False
    until: tuple[str, ...] = ()
    new_tokens: int = 0
    shots: int = 0
    record: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Return its name in the task."""
        return f"{self.subject}/{self.number}"


@dataclass(frozen=True)
class TaskOptions:
    """Options of a task.

    Attributes:
        scoring: ours, or the seed's rules for comparison with its numbers.
        shots: examples in the prompt; None for the task's own number.
        split: part of the data; empty for the task's own.
        new_tokens: longest generated answer; None for the task's own.
        limit: most questions of each subject; None for all.
        reasoning: examples and answers with their reasoning, where the data have it.
        samples: generated answers to each question, for pass@k.
        run: runs a program for HumanEval; None where that is not allowed.
        warn: takes a sentence about what is missing.
    """

    scoring: Scoring = "standard"
    shots: int | None = None
    split: str = ""
    new_tokens: int | None = None
    limit: int | None = None
    reasoning: bool = False
    samples: int = 1
    run: Callable[[str], tuple[bool, str]] | None = None
    warn: Callable[[str], None] = lambda text: None


Scores = Mapping[str, float]
Answer = Sequence[float] | Sequence[str]
"""Log-likelihoods of the choices, or generated texts."""


@dataclass(frozen=True)
class Task:
    """A benchmark.

    Attributes:
        name: of ``--task``.
        summary: for the listing.
        metrics: of `score`; the first is the one to compare.
        load: reads the questions from a folder or file.
        score: judges one answer.
        groups: names of groups of subjects, with their subjects.
        splits: parts of the data that may be asked for; the first by default.
    """

    name: str
    summary: str
    metrics: tuple[str, ...]
    load: Callable[[Path, TaskOptions], list[Item]]
    score: Callable[[Item, Answer, TaskOptions], Scores]
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    splits: tuple[str, ...] = ("test",)


def best(values: Sequence[float]) -> int:
    """Return the number of the largest value, the first of equal ones."""
    return max(range(len(values)), key=lambda at: (values[at], -at))


def choice_scores(item: Item, answer: Answer, options: TaskOptions) -> Scores:
    """Return whether the likeliest choice is the right one."""
    chosen = best([float(value) for value in answer])
    return {"acc": float(chosen == item.gold)}


@dataclass(frozen=True)
class Questions:
    """The questions of one task.

    Attributes:
        task: the benchmark.
        options: of the task.
        items: its questions.
        path: where they come from.
    """

    task: Task
    options: TaskOptions
    items: Sequence[Item]
    path: Path

    @property
    def prompt_hash(self) -> str:
        """Return a digest of all prompts and choices: equal digests mean comparable numbers."""
        digest = hashlib.sha256()
        for item in self.items:
            for text in (item.context, *item.choices, *item.until):
                digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
        return digest.hexdigest()[:16]
