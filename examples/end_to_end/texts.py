"""Write made-up texts and questions: ``texts.jsonl`` and ``questions.jsonl`` in a folder."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

WORDS = "the cat saw a dog and it ran to its house where nobody had ever been before that day".split()


def main(folder: Path) -> None:
    """Write both files."""
    draw = random.Random(7)
    folder.mkdir(parents=True, exist_ok=True)

    def words(count: int) -> str:
        return " ".join(draw.choices(WORDS, k=count))

    texts = [{"text": words(60)} for _ in range(200)]
    questions = [{"instruction": words(5), "input": "", "output": words(4)} for _ in range(64)]
    for name, records in (("texts", texts), ("questions", questions)):
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
