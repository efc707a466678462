"""An evaluation: questions from local files, asked through lm-eval, with results for each subject and task.

lm-eval makes the requests, sends them to our model, and computes means and standard errors; prompts, and the
judgement of each answer, are the tasks' own (`mindspeed_models.evaluation.tasks`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import DataError, UserError
from mindspeed_models.evaluation.items import Item, Questions, Task, TaskOptions
from mindspeed_models.evaluation.results import Sample, SubjectResult, TaskResult

if TYPE_CHECKING:
    from mindspeed_models.evaluation.answers import AnswerLog
    from mindspeed_models.inference.loaded import LoadedModel
    from mindspeed_models.serving.prompts import Prompts

_NEEDED = "evaluation needs lm-eval; run pip install 'mindspeed-models[eval]'"


def load_questions(task: Task, path: Path, options: TaskOptions) -> Questions:
    """Read the questions of a task.

    Raises:
        UserError: files are missing or damaged, or hold none.
    """
    items = task.load(path, options)
    if options.limit is not None:
        counts: dict[str, int] = {}
        kept = []
        for item in items:
            counts[item.subject] = counts.get(item.subject, 0) + 1
            if counts[item.subject] <= options.limit:
                kept.append(item)
        items = kept
    if not items:
        raise DataError(f"{path}: holds no question of {task.name}")
    return Questions(task, options, items, path)


def check_engine() -> None:
    """Refuse to begin where lm-eval is missing.

    Raises:
        UserError: it is.
    """
    try:
        import lm_eval.evaluator
    except ImportError as error:
        raise UserError(f"{_NEEDED} ({error})") from error
    del lm_eval


def evaluate(
    model: LoadedModel,
    prompts: Prompts,
    asked: Sequence[Questions],
    log: AnswerLog,
    *,
    batch_tokens: int = 16384,
    seed: int = 0,
    temperature: float = 0.0,
    say: Callable[[str], None] | None = None,
) -> list[TaskResult]:
    """Ask all questions and judge the answers.

    Args:
        model: of the leader; other ranks follow.
        prompts: turn text into ids.
        asked: the questions.
        log: earlier answers; new ones are added.
        batch_tokens: tokens computed together at most.
        seed: of drawn answers.
        temperature: of several answers to one question.
        say: takes lines about progress.

    Raises:
        UserError: lm-eval is missing.
    """
    check_engine()
    from lm_eval.evaluator import evaluate as run

    from mindspeed_models.evaluation.language_model import LanguageModel, question_key

    tasks: dict[str, Any] = {}
    items: dict[str, list[Item]] = {}
    failed: dict[str, str] = {}
    with _quiet():
        for questions in asked:
            for subject, found in by_subject(questions.items).items():
                name = f"{questions.task.name}:{subject}"
                items[name] = found
                tasks[name] = _task(name, questions, found, failed)
        language_model = LanguageModel(
            model,
            prompts,
            log,
            items,
            batch_tokens=batch_tokens,
            seed=seed,
            temperature=temperature,
            say=say,
        )
        # One iteration: standard errors of means have a formula, nothing else is asked for.
        judged = run(language_model, tasks, bootstrap_iters=1, log_samples=True, confirm_run_unsafe_code=True)
    errors = {**language_model.errors, **failed}
    results = []
    for questions in asked:
        subjects = []
        for subject in by_subject(questions.items):
            name = f"{questions.task.name}:{subject}"
            samples = [
                _sample(entry, items[name], questions, errors, language_model.truncated, question_key)
                for entry in judged["samples"][name]
            ]
            subjects.append(_subject(subject, judged["results"][name], samples, questions.task))
        results.append(TaskResult(questions, tuple(subjects)))
    return results


def by_subject(items: Sequence[Item]) -> dict[str, list[Item]]:
    """Return questions by their subject, in the order of the files."""
    found: dict[str, list[Item]] = {}
    for item in items:
        found.setdefault(item.subject, []).append(item)
    return found


def _task(name: str, questions: Questions, items: list[Item], failed: dict[str, str]) -> Any:
    """Make a task of lm-eval whose prompts are ready."""
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    task, options = questions.task, questions.options
    metrics = metrics_of(task, options)

    def judge(doc: Mapping[str, Any], answers: Sequence[Any]) -> dict[str, float]:
        item = items[doc["at"]]
        values = [each[0] if item.choices else each for each in answers]
        if len(values) == 1 and isinstance(values[0], list):
            values = values[0]
        if any(isinstance(value, float) and math.isnan(value) for value in values):
            return dict.fromkeys(metrics, 0.0)
        try:
            return {**dict.fromkeys(metrics, 0.0), **task.score(item, values, options)}
        except ScoringFailed as error:
            failed[f"{task.name}/{item.key}"] = str(error)
            return dict.fromkeys(metrics, 0.0)

    choices = bool(items[0].choices)
    if any(bool(item.choices) != choices for item in items):
        raise AssertionError(f"{name} mixes choices and generated answers")
    common = {
        "task": name,
        "custom_dataset": lambda **given: {"test": Dataset.from_dict({"at": list(range(len(items)))})},
        "test_split": "test",
        "doc_to_text": lambda doc: items[doc["at"]].context,
        "process_results": judge,
        "metric_list": [
            {"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in metrics
        ],
        "num_fewshot": 0,
        "target_delimiter": "",
    }
    if choices:
        kind = {
            "output_type": "multiple_choice",
            "doc_to_choice": lambda doc: list(items[doc["at"]].choices),
            "doc_to_target": lambda doc: items[doc["at"]].gold or 0,
        }
    else:
        kind = {
            "output_type": "generate_until",
            "doc_to_target": lambda doc: items[doc["at"]].target,
            "generation_kwargs": {"until": list(items[0].until), "max_gen_toks": items[0].new_tokens},
            "repeats": options.samples,
            "filter_list": [{"name": "all", "filter": []}],
        }

    class PreparedTask(ConfigurableTask):
        """A task of lm-eval that asks what the items say, without building prompts of its own."""

        def build_all_requests(
            self,
            *,
            limit: int | None = None,
            samples: list[int] | None = None,
            rank: int = 0,
            world_size: int = 1,
            **others: Any,
        ) -> None:
            """Make the requests of all questions."""
            self._instances = []
            documents = self.doc_iterator(rank=rank, limit=limit, samples=samples, world_size=world_size)
            for number, doc in documents:
                context = items[doc["at"]].context
                made = self.construct_requests(
                    doc=doc, ctx=context, metadata=(name, number, self.config.repeats)
                )
                self._instances += made if isinstance(made, list) else [made]

    return PreparedTask(config={**common, **kind})


class ScoringFailed(Exception):
    """An answer that could not be judged."""


def metrics_of(task: Task, options: TaskOptions) -> tuple[str, ...]:
    """Return the metrics of a task under its options."""
    if task.name == "human_eval":
        return tuple(f"pass@{k}" for k in (1, 10, 100) if k <= options.samples)
    return task.metrics[:1] if options.scoring == "seed" else task.metrics


def _sample(
    entry: Mapping[str, Any],
    items: Sequence[Item],
    questions: Questions,
    errors: Mapping[str, str],
    truncated: set[str],
    question_key: Callable[[str, Item], str],
) -> Sample:
    item = items[entry["doc"]["at"]]
    key = question_key(questions.task.name, item)
    responses = [each[0] if len(each) == 1 else list(each) for each in entry["resps"]]
    scores = {name: float(entry[name]) for name in metrics_of(questions.task, questions.options)}
    return Sample(item, responses, scores, key in truncated, errors.get(key))


def _subject(subject: str, found: Mapping[str, Any], samples: list[Sample], task: Task) -> SubjectResult:
    means: dict[str, float] = {}
    deviations: dict[str, float] = {}
    for name, value in found.items():
        metric, _, _ = name.partition(",")
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        if metric.endswith("_stderr"):
            deviations[metric.removesuffix("_stderr")] = float(value)
        elif "," in name:
            means[metric] = float(value)
    return SubjectResult(subject, means, deviations, tuple(samples))


class _quiet:
    """lm-eval's own log, which speaks of downloads and settings that are not used here, left out."""

    def __enter__(self) -> None:
        self._logger = logging.getLogger("lm_eval")
        self._level = self._logger.level
        self._logger.setLevel(logging.ERROR)

    def __exit__(self, *ignored: object) -> None:
        self._logger.setLevel(self._level)


def with_runner(options: TaskOptions, run: Callable[[str], tuple[bool, str]]) -> TaskOptions:
    """Return options that run programs; where the sandbox fails the question has no answer."""
    from mindspeed_models.sandbox.run import SandboxFailed

    def guarded(program: str) -> tuple[bool, str]:
        try:
            return run(program)
        except SandboxFailed as error:
            raise ScoringFailed(f"the sandbox failed: {error}") from error

    return replace(options, run=guarded)
