"""GSM8K: problems of arithmetic in words; the answer is a number at the end of a solution."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mindspeed_core.errors import DataError
from mindspeed_models.evaluation.files import field_of, read_json, read_lines, sibling, split_files
from mindspeed_models.evaluation.items import Answer, Item, Scores, Task, TaskOptions

_SHOTS = 3
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")
_STRICT = re.compile(r"(?:####|[Tt]he answer is:?)\s*(-?\$?\d[\d,]*(?:\.\d+)?)")
_SEED = re.compile(r"The answer is (.*?) ")
_CALCULATOR = re.compile(r"<<[^>]*>>")


def load(path: Path, options: TaskOptions) -> list[Item]:
    """Read JSON lines, or a JSON list, of question and answer; examples come from ``train.jsonl``."""
    found = split_files(path, options.split, "*.json*", "gsm8k")
    file = next((each for each in found if each.stem == (options.split or "test")), found[0])
    examples = _examples(file, options)
    head = "".join(f"Question: {question}\nAnswer: {solution}\n\n" for question, solution in examples)
    items = []
    for at, (number, record) in enumerate(_records(file)):
        question = field_of(record, "question", str, file, number)
        answer = field_of(record, "answer", (str, list, int, float), file, number)
        items.append(
            Item(
                file.stem,
                at,
                f"{head}Question: {question}\nAnswer:",
                final_number(answer, file, number),
                until=() if options.scoring == "seed" else ("Question:", "\n\nQ:"),
                new_tokens=options.new_tokens or 256,
                shots=len(examples),
                record={"answer": answer},
            )
        )
    return items


def score(item: Item, answer: Answer, options: TaskOptions) -> Scores:
    """Compare numbers: that which the text names as its answer (strict), and the last one (flexible)."""
    text = str(answer[0])
    if options.scoring == "seed":
        found = _SEED.findall(text.split("Q:")[0])
        right = item.record["answer"]
        return {"exact_match": float(found == (right if isinstance(right, list) else [item.target]))}
    strict = _STRICT.search(text)
    numbers = _NUMBER.findall(text)
    return {
        "exact_match": float(strict is not None and same_number(strict.group(1), item.target)),
        "flexible": float(bool(numbers) and same_number(numbers[-1], item.target)),
    }


def same_number(answered: str, right: str) -> bool:
    """Compare two numbers without their dollars, commas and zeros."""
    return _value(answered) == _value(right)


def final_number(answer: Any, file: Path, number: int) -> str:
    """Return the number behind ``####``, or the whole answer where there is no such mark.

    Raises:
        DataError: it is no number.
    """
    text = str(answer[0] if isinstance(answer, list) and answer else answer)
    text = text.rpartition("####")[2].strip()
    if _value(text) is None:
        raise DataError(f"{file} line {number}: the answer ends in {text[:40]!r}, which is no number")
    return text


def _value(text: str) -> float | None:
    try:
        return float(text.replace("$", "").replace(",", "").rstrip("."))
    except ValueError:
        return None


def _records(file: Path) -> list[tuple[int, Any]]:
    if file.suffix != ".json":
        return read_lines(file)
    content = read_json(file)
    if not isinstance(content, list):
        raise DataError(f"{file} line 1: is no list; is it a file of another task?")
    return list(enumerate(content, start=1))


def _examples(file: Path, options: TaskOptions) -> list[tuple[str, str]]:
    wanted = _SHOTS if options.shots is None else options.shots
    if not wanted:
        return []
    train = sibling(file, "train.jsonl", "train.json")
    if train is None:
        options.warn("gsm8k: there is no train.jsonl, so no examples are shown")
        return []
    found = []
    for number, record in _records(train)[:wanted]:
        question = field_of(record, "question", str, train, number)
        solution, _, final = field_of(record, "answer", str, train, number).rpartition("####")
        spelled = _CALCULATOR.sub("", solution).strip()
        found.append((question, f"{spelled}\nThe answer is {final.strip()}."))
    return found


TASK = Task(
    "gsm8k", "arithmetic in words", ("exact_match", "flexible"), load, score, splits=("test", "train")
)
