"""Write real texts and questions about them: what ``run.sh`` trains on, and what it asks at the end.

The texts are the manual's topics and the docstrings and comments of the standard library, which every Python
has. Each document is cut into blocks of words; every eighth is held out of all training. A question asks
which part of Python a passage is from, or whether a bracket opens in it.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path

from mindspeed_train.text.corpus import corpus_documents

PARTS = ("asyncio", "email", "idlelib", "manual", "tkinter", "unittest")
WHERE, BRACKET = "Which part of Python is this?", "Does a bracket open here?"
BLOCK, HELD_OUT = 120, 8
PASSAGE = 24
QUESTIONS, ASKED = 6000, 300


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


def passage(words: list[str], draw: random.Random) -> str:
    """Return some words of a block that follow each other."""
    start = draw.randrange(len(words) - PASSAGE)
    return " ".join(words[start : start + PASSAGE])


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

    def parts(source: dict[str | None, list[list[str]]], count: int) -> list[dict[str, str]]:
        """Return so many questions for the part, about each part in turn."""
        turns = [PARTS[number % len(PARTS)] for number in range(count)]
        return [
            {"instruction": WHERE, "input": passage(draw.choice(source[part]), draw), "output": part}
            for part in turns
        ]

    def brackets(source: dict[str | None, list[list[str]]], count: int) -> list[dict[str, str]]:
        """Return so many questions for a bracket; half of the answers are yes."""
        found: dict[str, list[str]] = {"yes": [], "no": []}
        while min(map(len, found.values())) < count // 2:
            text = passage(draw.choice(source[draw.choice(PARTS)]), draw)
            found["yes" if "(" in text else "no"].append(text)
        return [
            {"instruction": BRACKET, "input": text, "output": answer}
            for answer, texts in found.items()
            for text in texts[: count // 2]
        ]

    folder.mkdir(parents=True, exist_ok=True)
    mixed = [*parts(trained, QUESTIONS), *brackets(trained, QUESTIONS // 2)]
    draw.shuffle(mixed)
    for name, records in (
        ("texts", texts),
        ("mixed", mixed),
        ("parts", parts(trained, QUESTIONS)),
        ("asked", [*parts(held, ASKED), *brackets(held, ASKED)]),
    ):
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
