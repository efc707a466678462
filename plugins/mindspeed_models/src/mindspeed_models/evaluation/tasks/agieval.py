"""AGIEval: questions of entrance and qualification tests, in English and Chinese."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mindspeed_core.errors import DataError
from mindspeed_models.evaluation.files import field_of, files_in, read_lines, sibling
from mindspeed_models.evaluation.items import Answer, Item, Scores, Task, TaskOptions, choice_scores

_ENGLISH = (
    "aqua-rat math logiqa-en lsat-ar lsat-lr lsat-rc sat-math sat-en sat-en-without-passage gaokao-english"
).split()
_CHINESE = (
    "logiqa-zh gaokao-chinese gaokao-geography gaokao-history gaokao-biology gaokao-chemistry gaokao-physics "
    "gaokao-mathqa gaokao-mathcloze jec-qa-kd jec-qa-ca"
).split()
GROUPS = {"english": _ENGLISH, "chinese": _CHINESE}
_LETTERS = "ABCDE"
_ALONE = re.compile(r"(?<![A-Za-z])[A-E]+(?![A-Za-z])")
_SPACES = re.compile(r"[\s$()（）]+")


def load(path: Path, options: TaskOptions) -> list[Item]:
    """Read ``SUBJECT.jsonl``; examples come from ``dev/SUBJECT.jsonl``."""
    items = []
    for file in files_in(path, "*.jsonl", "agieval"):
        subject = file.stem
        if subject not in (*_ENGLISH, *_CHINESE):
            known = ", ".join((*_ENGLISH, *_CHINESE))
            raise DataError(f"{file}: {subject!r} is no subject of agieval; they are {known}")
        examples = _examples(file, options)
        asked = [_asked(subject, record, file, number) for number, record in read_lines(file)]
        # One way of judging for a subject: letters are compared where each question has one right letter.
        compared = options.scoring != "seed" and all(
            len(right) == 1 and letters for _, right, letters in asked
        )
        items += [
            _item(subject, at, each, examples, options, compared=compared) for at, each in enumerate(asked)
        ]
    return items


def score(item: Item, answer: Answer, options: TaskOptions) -> Scores:
    """Judge the likeliest letter, several letters as a set, and free answers by their text."""
    if item.choices:
        return choice_scores(item, answer, options)
    text = str(answer[0])
    line = text.strip().split("\n")[0]
    if options.scoring == "seed":
        return {"acc": float(line.strip() == item.target)}
    if item.record["letters"]:
        return {"acc": float(set("".join(_ALONE.findall(line))) == set(item.target))}
    return {"acc": float(normalized(line) == normalized(item.target))}


def normalized(text: str) -> str:
    """Return an answer without dollars, parentheses, blanks and a full stop at its end."""
    return _SPACES.sub("", text).rstrip(".。")


def _item(
    subject: str,
    at: int,
    asked: tuple[str, str, str],
    examples: list[str],
    options: TaskOptions,
    *,
    compared: bool,
) -> Item:
    question, right, letters = asked
    seed = options.scoring == "seed"
    context = "".join(f"{example}\n\n" for example in examples) + question
    record = {"letters": bool(letters)}
    if compared:
        space = "" if subject in _CHINESE else " "
        choices = tuple(f"{space}{letter}" for letter in letters)
        gold = letters.index(right)
        return Item(subject, at, context, right, choices, gold, shots=len(examples), record=record)
    return Item(
        subject,
        at,
        context,
        right,
        until=() if seed else ("\n\n", "\nQ:", "\n问题"),
        new_tokens=options.new_tokens or (1024 if seed else 64),
        shots=len(examples),
        record=record,
    )


def _asked(subject: str, record: Any, file: Path, number: int) -> tuple[str, str, str]:
    """Return the prompt of a question, its right answer, and the letters of its options."""
    question = field_of(record, "question", str, file, number)
    passage = record.get("passage") or ""
    options = record.get("options") or []
    if not isinstance(options, list) or not all(isinstance(text, str) for text in options):
        raise DataError(f"{file} line {number}: 'options' is no list of texts; copy the file again")
    chinese = subject in _CHINESE
    if not options:
        right = record.get("answer")
        if not isinstance(right, (str, int, float)) or right == "":
            raise DataError(f"{file} line {number}: has neither options nor an answer")
        asked = (
            f"{passage}问题：{question}\n答案：" if chinese else f"{passage}Q: {question}\nA: The answer is"
        )
        return asked, str(right), ""
    letters = _LETTERS[: len(options)]
    label = record.get("label")
    right = "".join(label) if isinstance(label, list) else str(label)
    if not right or any(letter not in letters for letter in right):
        raise DataError(f"{file} line {number}: the label is {right[:20]!r}, not one of {', '.join(letters)}")
    shown = " ".join(options)
    if chinese:
        asked = f"{passage}问题：{question} 选项：{shown}\n答案：从A到{letters[-1]}，我们应选择"
    else:
        asked = (
            f"{passage}Q: {question} Answer Choices: {shown}\nA: Among A through {letters[-1]}, the answer is"
        )
    return asked, right, letters


def _examples(file: Path, options: TaskOptions) -> list[str]:
    wanted = options.shots or 0
    if not wanted:
        return []
    found = sibling(file, f"dev/{file.name}")
    if found is None:
        options.warn(f"agieval {file.stem}: there is no dev/{file.name}, so no examples are shown")
        return []
    space = "" if file.stem in _CHINESE else " "
    examples = []
    for number, record in read_lines(found)[:wanted]:
        question, right, _ = _asked(file.stem, record, found, number)
        examples.append(f"{question}{space}{right}")
    return examples


TASK = Task("agieval", "entrance and qualification tests", ("acc",), load, score, GROUPS)
