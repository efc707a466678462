"""Results of an evaluation: means with standard errors, a table, JSON, and a log of every question."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_models.evaluation.items import Item, best

if TYPE_CHECKING:
    from mindspeed_models.evaluation.items import Questions

MICRO, MACRO = "micro", "macro"


@dataclass(frozen=True)
class Sample:
    """One judged question.

    Attributes:
        item: the question.
        answers: log-likelihoods with whether they are the likeliest, or texts.
        scores: by metric.
        truncated: its prompt was cut.
        error: why there is no answer; None where there is one.
    """

    item: Item
    answers: Sequence[Any]
    scores: Mapping[str, float]
    truncated: bool
    error: str | None


@dataclass(frozen=True)
class SubjectResult:
    """Results of one subject.

    Attributes:
        subject: its name.
        means: by metric.
        deviations: standard errors of the means; nan for a single question.
        samples: its questions.
    """

    subject: str
    means: Mapping[str, float]
    deviations: Mapping[str, float]
    samples: Sequence[Sample]


@dataclass(frozen=True)
class Mean:
    """A mean over subjects or questions.

    Attributes:
        name: of what.
        value: the mean.
        deviation: its standard error; nan where it is not known.
        count: questions.
    """

    name: str
    value: float
    deviation: float
    count: int


@dataclass(frozen=True)
class TaskResult:
    """Results of one task.

    Attributes:
        questions: what was asked.
        subjects: results of each.
    """

    questions: Questions
    subjects: Sequence[SubjectResult]

    @property
    def samples(self) -> list[Sample]:
        """Return all questions."""
        return [sample for subject in self.subjects for sample in subject.samples]

    @property
    def errors(self) -> int:
        """Return how many questions have no answer; they count as wrong in the means."""
        return sum(sample.error is not None for sample in self.samples)

    @property
    def truncated(self) -> int:
        """Return how many prompts were cut."""
        return sum(sample.truncated for sample in self.samples)

    @property
    def labelled(self) -> bool:
        """Return whether the right answers are known."""
        return any(sample.item.gold is not None or not sample.item.choices for sample in self.samples)

    def means(self, metric: str) -> list[Mean]:
        """Return means over groups of subjects, over all subjects (macro) and over all questions (micro)."""
        found = []
        for name, subjects in self.questions.task.groups.items():
            samples = [each for part in self.subjects if part.subject in subjects for each in part.samples]
            if samples:
                found.append(_mean(name, [sample.scores[metric] for sample in samples]))
        if len(self.subjects) > 1:
            values = [subject.means[metric] for subject in self.subjects]
            errors = [subject.deviations.get(metric, math.nan) for subject in self.subjects]
            spread = math.sqrt(sum(error**2 for error in errors)) / len(errors)
            found.append(Mean(MACRO, statistics.fmean(values), spread, len(self.samples)))
        found.append(_mean(MICRO, [sample.scores[metric] for sample in self.samples]))
        return found


def as_json(results: Sequence[TaskResult], **facts: Any) -> dict[str, Any]:
    """Return the results as one JSON object."""
    tasks = {}
    for result in results:
        options = result.questions.options
        metrics = list(result.subjects[0].means)
        tasks[result.questions.task.name] = {
            "scoring": options.scoring,
            "split": options.split or result.questions.task.splits[0],
            "shots": sorted({item.shots for item in result.questions.items}),
            "prompt_hash": result.questions.prompt_hash,
            "questions": len(result.samples),
            "truncated": result.truncated,
            "errors": result.errors,
            "labelled": result.labelled,
            "means": {
                metric: {each.name: _numbers(each.value, each.deviation) for each in result.means(metric)}
                for metric in metrics
            }
            if result.labelled
            else {},
            "subjects": {
                subject.subject: {
                    "questions": len(subject.samples),
                    **{
                        metric: _numbers(subject.means[metric], subject.deviations.get(metric, math.nan))
                        for metric in metrics
                    },
                }
                for subject in result.subjects
            }
            if result.labelled
            else {},
        }
    return {**facts, "tasks": tasks}


def table(results: Sequence[TaskResult]) -> str:
    """Return the results as aligned text."""
    head = ("task", "of", "metric", "value", "± stderr", "questions", "cut", "errors")
    rows: list[tuple[str, ...]] = []
    for result in results:
        name = result.questions.task.name
        if not result.labelled:
            rows.append((name, "", "answers are not public", "", "", str(len(result.samples)), "", ""))
            continue
        for metric in result.subjects[0].means:
            for mean in result.means(metric):
                last = mean.name == MICRO
                deviation = "" if math.isnan(mean.deviation) else f"{mean.deviation:.4f}"
                counts = (str(result.truncated), str(result.errors)) if last else ("", "")
                rows.append(
                    (name, mean.name, metric, f"{mean.value:.4f}", deviation, str(mean.count), *counts)
                )
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in (head, *rows)
    ]
    return "\n".join(lines)


def write(folder: Path, results: Sequence[TaskResult], **facts: Any) -> None:
    """Write ``results.json``, questions of each task, and ``submission.json`` where answers are unknown."""
    for result in results:
        name = result.questions.task.name
        with (folder / f"samples_{name}.jsonl").open("w", encoding="utf-8") as file:
            for sample in result.samples:
                file.write(json.dumps(_logged(sample), ensure_ascii=False) + "\n")
        if not result.labelled:
            _write_json(folder / "submission.json", submission(result))
    _write_json(folder / "results.json", as_json(results, **facts))


def submission(result: TaskResult) -> dict[str, dict[str, str]]:
    """Return the chosen letters by subject and id, in the form that C-Eval takes."""
    found: dict[str, dict[str, str]] = {}
    for sample in result.samples:
        item = sample.item
        letter = (
            item.choices[best([each[0] for each in sample.answers])]
            if item.choices
            else str(sample.answers[0]).strip()[:1]
        )
        found.setdefault(item.subject, {})[str(item.record["id"])] = letter.strip()
    return found


def _logged(sample: Sample) -> dict[str, Any]:
    item = sample.item
    return {
        "question": item.key,
        "prompt": item.context,
        "target": item.target,
        "choices": list(item.choices),
        "answers": list(sample.answers),
        "scores": dict(sample.scores),
        "truncated": sample.truncated,
        "error": sample.error,
    }


def _mean(name: str, values: Sequence[float]) -> Mean:
    spread = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Mean(name, statistics.fmean(values), spread, len(values))


def _numbers(value: float, deviation: float) -> dict[str, float | None]:
    return {"value": value, "stderr": None if math.isnan(deviation) else deviation}


def _write_json(path: Path, value: Any) -> None:
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)
