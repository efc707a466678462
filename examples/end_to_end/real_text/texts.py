"""Write real texts and questions about them: what ``run.sh`` trains on, and what it asks at the end.

The texts are the manual's topics and the docstrings and comments of the standard library, which every Python
has. Each document is cut into blocks of sentences; every eighth is held out of all training. A question asks
which part of Python a passage is from, or for the words that follow.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path

from mindspeed_train.text.corpus import corpus_documents

PARTS = ("asyncio", "email", "idlelib", "manual", "tkinter", "unittest")
WHERE, CONTINUE = "Which part of Python is this text from?", "Continue this text."
BLOCK, HELD_OUT = 120, 8
PASSAGE, FOLLOWING = 24, 6
QUESTIONS, ASKED = 3000, 240


def part_of(name: str) -> str | None:
    """Return the part of Python that a document is from; None for one that nobody is asked about."""
    kind, module, *_ = name.split(".")
    part = "manual" if kind == "topic" else module
    return part if part in PARTS else None


def blocks() -> Iterable[tuple[str | None, bool, list[str]]]:
    """Yield the part, whether it is held out, and the words of each block."""
    for name, text in corpus_documents():
        words = text.split()
        for number, start in enumerate(range(0, len(words), BLOCK)):
            yield part_of(name), number % HELD_OUT == HELD_OUT - 1, words[start : start + BLOCK]


def question(words: list[str], part: str | None, draw: random.Random) -> dict[str, str]:
    """Return a record about a passage of a block; without a part it asks for the words that follow."""
    start = draw.randrange(len(words) - PASSAGE - FOLLOWING)
    passage = " ".join(words[start : start + PASSAGE])
    following = " ".join(words[start + PASSAGE : start + PASSAGE + FOLLOWING])
    if part is None:
        return {"instruction": CONTINUE, "input": passage, "output": following}
    return {"instruction": WHERE, "input": passage, "output": part}


def main(folder: Path) -> None:
    """Write the texts, the questions of both trainings, and those that are asked at the end."""
    draw = random.Random(7)
    trained: dict[str | None, list[list[str]]] = {}
    held: dict[str | None, list[list[str]]] = {}
    texts = []
    for part, out, words in blocks():
        if len(words) == BLOCK:
            (held if out else trained).setdefault(part, []).append(words)
        if not out and part is not None:
            texts.append({"text": " ".join(words)})

    def questions(source: dict[str | None, list[list[str]]], count: int) -> list[dict[str, str]]:
        """Return so many questions about the parts, in turns."""
        return [
            question(draw.choice(source[PARTS[number % len(PARTS)]]), PARTS[number % len(PARTS)], draw)
            for number in range(count)
        ]

    def continuations(source: dict[str | None, list[list[str]]], count: int) -> list[dict[str, str]]:
        """Return so many questions for the words that follow."""
        return [question(draw.choice(source[draw.choice(PARTS)]), None, draw) for _ in range(count)]

    folder.mkdir(parents=True, exist_ok=True)
    mixed = [*questions(trained, QUESTIONS), *continuations(trained, QUESTIONS // 2)]
    draw.shuffle(mixed)
    for name, records in (
        ("texts", texts),
        ("mixed", mixed),
        ("parts", questions(trained, QUESTIONS)),
        ("asked", [*questions(held, ASKED), *continuations(held, ASKED // 2)]),
    ):
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
