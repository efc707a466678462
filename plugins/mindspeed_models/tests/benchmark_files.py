"""Tiny files of seven benchmarks in their real formats; the questions are made up."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

CHOICES = [
    ("Which animal runs", "cat", "house", "day", "before", "A"),
    ("Where did it run", "dog", "a house", "ever", "saw", "B"),
    ('Who saw, "it"\nthat day', "nobody", "it", "the dog", "where", "C"),
    ("What had been before", "a", "b", "c", "the day", "D"),
]


def jsonl(path: Path, records: list[Any]) -> Path:
    """Write JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in records), encoding="utf-8"
    )
    return path


def rows(path: Path, records: list[Any]) -> Path:
    """Write comma-separated values."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(records)
    return path


def boolq(root: Path) -> Path:
    """BoolQ."""
    passage = "The cat saw a dog and it ran to its house."
    asked = [("did the cat see a dog", True), ("did nobody run", False), ("was it a day", True)]
    records = [{"question": q, "passage": passage, "answer": a, "title": "Cat"} for q, a in asked]
    jsonl(root / "boolq" / "test" / "dev.jsonl", records)
    return root / "boolq" / "test"


def mmlu(root: Path) -> Path:
    """MMLU: two subjects, one with examples."""
    rows(root / "mmlu" / "test" / "anatomy_test.csv", CHOICES)
    rows(root / "mmlu" / "test" / "world_religions_test.csv", CHOICES[:2])
    rows(root / "mmlu" / "dev" / "anatomy_dev.csv", CHOICES[::-1] + CHOICES)
    return root / "mmlu"


def gsm8k(root: Path) -> Path:
    """GSM8K, with training data for examples."""
    solution = "It saw 2 and 3 dogs: 2+3=<<2+3=5>>5.\n#### 5"
    train = [{"question": f"It saw {n} dogs. How many?", "answer": solution} for n in range(5)]
    jsonl(root / "gsm8k" / "train.jsonl", train)
    test = [
        {"question": "How many days?", "answer": "Work.\n#### 1,234"},
        {"question": "How many cats?", "answer": "#### -7"},
    ]
    jsonl(root / "gsm8k" / "test.jsonl", test)
    return root / "gsm8k"


def human_eval(root: Path) -> Path:
    """HumanEval: two functions."""
    records = [
        {
            "task_id": f"HumanEval/{n}",
            "prompt": f'def f{n}(a):\n    """ Return a plus {n}. """\n',
            "entry_point": f"f{n}",
            "canonical_solution": f"    return a + {n}\n",
            "test": f"def check(candidate):\n    assert candidate(1) == {n + 1}\n",
        }
        for n in range(2)
    ]
    jsonl(root / "human_eval" / "human_eval.jsonl", records)
    return root / "human_eval"


def agieval(root: Path) -> Path:
    """AGIEval: one right letter, several, and free answers; English and Chinese."""
    options = ["(A)a cat", "(B)a dog", "(C)a house", "(D)a day"]
    one = {"passage": "It ran. ", "question": "Who ran?", "options": options, "label": "B", "answer": None}
    folder = root / "agieval"
    jsonl(folder / "sat-en.jsonl", [one, {**one, "passage": None, "label": "D"}])
    jsonl(
        folder / "math.jsonl",
        [{"passage": None, "question": "1+1?", "options": None, "label": None, "answer": "$2$"}],
    )
    jsonl(folder / "jec-qa-kd.jsonl", [{**one, "passage": "", "label": ["A", "C"]}, {**one, "label": ["D"]}])
    jsonl(folder / "gaokao-history.jsonl", [{**one, "passage": "", "question": "谁跑了？"}])
    jsonl(folder / "dev" / "sat-en.jsonl", [one, one])
    return folder


def bbh(root: Path) -> Path:
    """BIG-Bench Hard, with prompts of which the direct ones are made."""
    content = {
        "canary": "x",
        "examples": [{"input": "not ( True )", "target": "False"}, {"input": "True", "target": "True"}],
    }
    folder = root / "bbh"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "boolean_expressions.json").write_text(json.dumps(content))
    (folder / "cot-prompts").mkdir(exist_ok=True)
    shots = "".join(
        f"Q: not {value}\nA: Let's think step by step.\nWe negate it.\nSo the answer is {not value}.\n\n"
        for value in (True, False, True, False)
    )
    (folder / "cot-prompts" / "boolean_expressions.txt").write_text(
        f"Evaluate an expression.\n\n{shots}".rstrip()
    )
    return folder


def ceval(root: Path) -> Path:
    """C-Eval: all three parts of one subject."""
    head = ["id", "question", "A", "B", "C", "D", "answer", "explanation"]
    row = ["谁看见了一只狗", "猫", "房子", "天", "没有人", "A", "因为"]
    folder = root / "ceval"
    rows(folder / "val" / "logic_val.csv", [head[:-1], *([n, *row[:-1]] for n in range(3))])
    rows(folder / "dev" / "logic_dev.csv", [head, *([n, *row] for n in range(6))])
    rows(folder / "test" / "logic_test.csv", [head[:-2], *([n, *row[:-2]] for n in range(4))])
    return folder


ALL = {
    "boolq": boolq,
    "mmlu": mmlu,
    "gsm8k": gsm8k,
    "human_eval": human_eval,
    "agieval": agieval,
    "bbh": bbh,
    "ceval": ceval,
}
