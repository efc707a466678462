"""HumanEval: the rest of a function, judged by running its tests in the sandbox."""

from __future__ import annotations

from math import comb
from pathlib import Path

from mindspeed_core.errors import UserError
from mindspeed_models.evaluation.files import field_of, files_in, read_lines
from mindspeed_models.evaluation.items import Answer, Item, Scores, Task, TaskOptions

_UNTIL = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n@", "\n```")
_ORDERS = (1, 10, 100)


def load(path: Path, options: TaskOptions) -> list[Item]:
    """Read ``*.jsonl`` of task_id, prompt, entry_point and test."""
    if options.run is None:
        raise UserError(
            "--task human_eval: runs programs that the model wrote; say --allow-code-execution to run them "
            "in a sandbox"
        )
    items = []
    for file in files_in(path, "*.jsonl", "human_eval"):
        for number, record in read_lines(file):
            names = ("task_id", "prompt", "entry_point", "test")
            fields = {name: field_of(record, name, str, file, number) for name in names}
            items.append(
                Item(
                    file.stem,
                    number - 1,
                    fields["prompt"],
                    "",
                    until=() if options.scoring == "seed" else _UNTIL,
                    new_tokens=options.new_tokens or 1024,
                    record=fields,
                )
            )
    return items


def score(item: Item, answer: Answer, options: TaskOptions) -> Scores:
    """Run each answer with the tests; returns pass@k, unbiased, for each k up to their number."""
    assert options.run is not None
    passed = sum(options.run(program(item, str(text)))[0] for text in answer)
    return {f"pass@{k}": pass_at(len(answer), passed, k) for k in _ORDERS if k <= len(answer)}


def program(item: Item, text: str) -> str:
    """Return the program that judges an answer."""
    record = item.record
    return f"{record['prompt']}{text}\n\n{record['test']}\n\ncheck({record['entry_point']})\n"


def pass_at(samples: int, passed: int, k: int) -> float:
    """Return the chance that one of ``k`` answers passes, from those that passed (Chen et al. 2021)."""
    return 1.0 - comb(samples - passed, k) / comb(samples, k)


TASK = Task("human_eval", "the rest of a Python function", ("pass@1",), load, score)
