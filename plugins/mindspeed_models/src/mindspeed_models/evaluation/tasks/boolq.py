"""BoolQ: questions with the answers yes and no, about a passage."""

from __future__ import annotations

from pathlib import Path

from mindspeed_models.evaluation.files import field_of, read_lines, split_files
from mindspeed_models.evaluation.items import Answer, Item, Scores, Task, TaskOptions

_SPLITS = ("test", "val", "dev", "train")
_CHOICES = (" yes", " no", " Yes", " No")


def load(path: Path, options: TaskOptions) -> list[Item]:
    """Read ``*.jsonl`` of question, passage and answer."""
    items = []
    for file in split_files(path, options.split, "*.jsonl", "boolq"):
        for number, record in read_lines(file):
            passage = field_of(record, "passage", str, file, number)
            question = field_of(record, "question", str, file, number)
            answer = field_of(record, "answer", bool, file, number)
            seed = options.scoring == "seed"
            items.append(
                Item(
                    file.stem,
                    number - 1,
                    f"{passage}\nQuestion: {question}?\nAnswer:",
                    "yes" if answer else "no",
                    choices=("Yes", "No") if seed else _CHOICES,
                    gold=0 if answer else 1,
                    last_token=seed,
                )
            )
    return items


def score(item: Item, answer: Answer, options: TaskOptions) -> Scores:
    """Compare yes with no; a tie is a no, as in the seed."""
    values = [float(value) for value in answer]
    pairs = {"acc": values[:2]}
    if len(values) > 2:
        pairs["acc_capitalized"] = values[2:]
    return {name: float((yes > no) == (item.gold == 0)) for name, (yes, no) in pairs.items()}


TASK = Task("boolq", "yes or no about a passage", ("acc", "acc_capitalized"), load, score, splits=_SPLITS)
