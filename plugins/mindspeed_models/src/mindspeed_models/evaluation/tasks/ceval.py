"""C-Eval: 52 subjects in Chinese with four options; the answers of its test split are not public."""

from __future__ import annotations

from pathlib import Path

from mindspeed_core.errors import DataError
from mindspeed_models.evaluation.files import files_in, read_table, sibling
from mindspeed_models.evaluation.items import Answer, Item, Scores, Task, TaskOptions, choice_scores
from mindspeed_models.evaluation.tasks.letters import LETTERS, lettered

_SHOTS = 5
_COLUMNS = ("id", "question", *LETTERS)


def load(path: Path, options: TaskOptions) -> list[Item]:
    """Read ``SUBJECT_val.csv`` or, with ``--split test``, ``SUBJECT_test.csv``; examples from dev."""
    split = options.split or "val"
    folder = sibling(path, split) if path.is_dir() and not list(path.glob(f"*_{split}.csv")) else None
    items = []
    for file in files_in(folder or path, f"*_{split}.csv", "ceval"):
        subject = file.stem.removesuffix(f"_{split}")
        examples = _examples(file, subject, options)
        shots = "".join(f"{_asked(row)}{row['answer'].strip()}\n\n" for row in examples)
        columns = _COLUMNS if split == "test" else (*_COLUMNS, "answer")
        for at, (number, row) in enumerate(read_table(file, columns)):
            right = "" if split == "test" else _letter(row, file, number)
            seed = options.scoring == "seed"
            items.append(
                Item(
                    subject,
                    at,
                    f"{shots}{_asked(row)}",
                    right,
                    choices=() if seed else tuple(LETTERS),
                    gold=LETTERS.index(right) if right else None,
                    new_tokens=(options.new_tokens or 2) if seed else 0,
                    shots=len(examples),
                    record={"id": row["id"]},
                )
            )
    return items


def score(item: Item, answer: Answer, options: TaskOptions) -> Scores:
    """Judge by the likeliest letter, or as the seed does by equality of the text."""
    if not item.choices:
        return {"acc": float(str(answer[0]) == item.target)}
    return choice_scores(item, answer, options)


def _asked(row: dict[str, str]) -> str:
    options = lettered([row[letter].strip() for letter in LETTERS])
    return f"问：{row['question'].strip()}\n{options}\n答："


def _letter(row: dict[str, str], file: Path, number: int) -> str:
    letter = row["answer"].strip()
    if len(letter) != 1 or letter not in LETTERS:
        raise DataError(f"{file} line {number}: the answer is {letter[:20]!r}, not one of A to D")
    return letter


def _examples(file: Path, subject: str, options: TaskOptions) -> list[dict[str, str]]:
    wanted = _SHOTS if options.shots is None else options.shots
    if not wanted:
        return []
    found = sibling(file, f"dev/{subject}_dev.csv", f"{subject}_dev.csv")
    if found is None:
        options.warn(f"ceval {subject}: there is no dev/{subject}_dev.csv, so no examples are shown")
        return []
    rows = read_table(found, (*_COLUMNS, "answer"))[:wanted]
    for number, row in rows:
        _letter(row, found, number)
    return [row for _, row in rows]


TASK = Task("ceval", "four options in Chinese, 52 subjects", ("acc",), load, score, splits=("val", "test"))
