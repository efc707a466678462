"""Files for the proofs; imports no torch."""

from __future__ import annotations

import json
from pathlib import Path


def write_lines(folder: Path) -> None:
    """Write 40 lines of 9 to 33 tokens."""
    lines = [
        [(7 * line + 3 * token * (line % 5)) % 128 for token in range(9 + 6 * (3 * line % 5))]
        for line in range(40)
    ]
    (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
