"""Write made-up texts, questions, prompts and a benchmark into a folder."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

WORDS = "the cat saw a dog and it ran to its house where nobody had ever been before that day".split()


def main(folder: Path) -> None:
    """Write all files."""
    draw = random.Random(7)
    folder.mkdir(parents=True, exist_ok=True)

    def words(count: int) -> str:
        return " ".join(draw.choices(WORDS, k=count))

    texts = [{"text": words(60)} for _ in range(200)]
    questions = [{"instruction": words(5), "input": "", "output": words(4)} for _ in range(64)]
    prompts = [{"prompt": words(3)} for _ in range(4)]
    asked = [{"passage": words(20), "question": words(4), "answer": number % 2 == 0} for number in range(8)]
    (folder / "boolq").mkdir(exist_ok=True)
    for name, records in (
        ("texts", texts),
        ("questions", questions),
        ("prompts", prompts),
        ("boolq/dev", asked),
    ):
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
