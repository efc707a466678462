"""BIG-Bench Hard: short exact answers, directly or after reasoning."""

from __future__ import annotations

import re
from pathlib import Path

from mindspeed_core.errors import DataError
from mindspeed_models.evaluation.files import field_of, files_in, read_json, sibling
from mindspeed_models.evaluation.items import Answer, Item, Scores, Task, TaskOptions

_SHOTS = 3
_REASONING = "Let's think step by step."
_FINAL = re.compile(r"the answer is (.*?)\.?\s*$", re.IGNORECASE | re.MULTILINE)


def load(path: Path, options: TaskOptions) -> list[Item]:
    """Read ``TASK.json`` of examples; those of the prompt come from ``cot-prompts/TASK.txt``."""
    items = []
    for file in files_in(path, "*.json", "bbh"):
        content = read_json(file)
        records = field_of(content, "examples", list, file, 1)
        shots = _examples(file, options)
        head = "".join(f"Q: {question}\nA: {answer}\n\n" for question, answer in shots)
        begun = f" {_REASONING}" if options.reasoning else ""
        for number, record in enumerate(records):
            question = field_of(record, "input", str, file, number + 1)
            target = field_of(record, "target", str, file, number + 1)
            until = ("\n\n", "\nQ:", "Q:") if options.reasoning else ("\n", "Q:")
            items.append(
                Item(
                    file.stem,
                    number,
                    f"{head}Q: {question}\nA:{begun}",
                    target,
                    until=() if options.scoring == "seed" else until,
                    new_tokens=options.new_tokens or (512 if options.reasoning else 64),
                    shots=len(shots),
                )
            )
    return items


def score(item: Item, answer: Answer, options: TaskOptions) -> Scores:
    """Compare the first line, or what reasoning names as its answer, with the target."""
    text = str(answer[0])
    first = text.strip().split("\n")[0].strip()
    if options.scoring == "seed" or not options.reasoning:
        return {"exact_match": float(first == item.target)}
    found = _FINAL.findall(text)
    return {"exact_match": float(bool(found) and found[-1].strip() == item.target.strip().rstrip("."))}


def _examples(file: Path, options: TaskOptions) -> list[tuple[str, str]]:
    wanted = _SHOTS if options.shots is None else options.shots
    if not wanted:
        return []
    found = sibling(file, f"cot-prompts/{file.stem}.txt")
    if found is None:
        options.warn(f"bbh {file.stem}: there is no cot-prompts/{file.stem}.txt, so no examples are shown")
        return []
    text = found.read_text(encoding="utf-8")
    examples: list[tuple[str, str]] = []
    for block in re.split(r"\n(?=Q: )", f"\n{text}")[1:]:
        question, mark, answer = block.removeprefix("Q: ").partition("\nA: ")
        final = _FINAL.findall(answer.strip())
        if not mark or not final:
            raise DataError(f"{found}: example {len(examples) + 1} has no answer; copy the file again")
        examples.append((question.strip(), answer.strip() if options.reasoning else final[-1].strip()))
    return examples[:wanted]


TASK = Task("bbh", "23 hard tasks with exact answers", ("exact_match",), load, score)
