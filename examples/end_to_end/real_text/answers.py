"""Ask a trained model the questions that were held out, and write what its answers are worth.

``python answers.py WORK FOLDER`` adds a row to ``WORK/answers.json``: for both kinds of questions the mean
log-likelihood of a right answer, in nats, and the share of questions that the likeliest text answers,
letter for letter.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from texts import BRACKET, WHERE

import mindspeed_models

TEMPLATE = Path(__file__).with_name("questions.jinja")


def answers(model: Any, records: list[dict[str, str]]) -> dict[str, float]:
    """Return the numbers of one kind of questions."""
    asked = [
        model.encode([{"role": "user", "content": f"{each['instruction']}\n{each['input']}"}])
        for each in records
    ]
    right = [model.tokenizer.tokenize(each["output"]) for each in records]
    scores = model.score(list(zip(asked, right)))
    said = model.generate(asked, max_new_tokens=8, stop=["\n"])
    hits = sum(text.strip() == each["output"] for text, each in zip(said, records))
    return {
        "questions": len(records),
        "right": round(hits / len(records), 4),
        "nats": round(sum(each.logprob for each in scores) / len(records), 4),
    }


def main(work: Path, folder: str) -> None:
    """Ask one model, print and write the numbers."""
    lines = (work / "asked.jsonl").read_text(encoding="utf-8").split("\n")
    records = [json.loads(line) for line in lines if line]
    tokenizer = work / "tokenizer" / "text.tokenizer.json"
    flags = ("--model-config", str(work / "model"), "--tokenizer-model", str(tokenizer))
    with mindspeed_models.load(
        work / folder, flags=flags, platform="cpu", chat_template=str(TEMPLATE), batch_size=32
    ) as model:
        row = {
            "part": answers(model, [each for each in records if each["instruction"] == WHERE]),
            "bracket": answers(model, [each for each in records if each["instruction"] == BRACKET]),
        }
    path = work / "answers.json"
    table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    table[folder] = row
    path.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    print(f"{folder}: {json.dumps(row)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
