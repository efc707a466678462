"""Outcomes of proofs, noted as they come: a run that was cut short goes on where it ended."""

from __future__ import annotations

import json
import platform
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHANGED = "a changed tree"


@dataclass(frozen=True)
class Journal:
    """A file of outcomes, one JSON object a line: ``proof``, ``commit``, ``passed`` and ``text``."""

    path: Path

    def note(self, outcome: Mapping[str, object]) -> None:
        """Add an outcome behind all others."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(outcome) + "\n")

    def last(self) -> dict[str, dict[str, object]]:
        """Return the last outcome of each proof."""
        if not self.path.exists():
            return {}
        lines = map(json.loads, self.path.read_text(encoding="utf-8").splitlines())
        return {str(one["proof"]): one for one in lines}

    def passed_on(self, commits: Sequence[str]) -> dict[str, dict[str, object]]:
        """Return the proofs whose last outcome is that they passed, on one of these commits."""
        return {
            proof: one
            for proof, one in self.last().items()
            if one["passed"] and any(str(one["commit"]).startswith(commit) for commit in commits)
        }


def commit_of_tree(besides: Path) -> str:
    """Return the commit of the tree; a tree that is changed, ``besides`` this record, has none."""
    head = subprocess.run(("git", "rev-parse", "HEAD"), cwd=ROOT, capture_output=True, text=True, check=True)
    status = ("git", "status", "--porcelain", "--", ".", f":!{besides.relative_to(ROOT)}")
    changed = subprocess.run(status, cwd=ROOT, capture_output=True, text=True, check=True)
    return CHANGED if changed.stdout.strip() else head.stdout.strip()


def counted(found: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return how many of these outcomes passed on which commit, what failed, and with which versions."""
    return {
        "passed": dict(Counter(str(one["commit"]) for one in found if one["passed"])),
        "failed": sorted(str(one["proof"]) for one in found if not one["passed"]),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "megatron-core")},
        },
    }
