"""The rows of a section, written to its JSON file as they come so that a crash loses none of them."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Report:
    """Measurements of a section, and the terms they were taken under.

    Attributes:
        path: the JSON file.
        smoke: tiny sizes on CPU, to run the code and nothing else.
        deadline: ``time.monotonic()`` at which the section should be done.
        facts: what stands beside the rows (machine, command).
        rows: one dictionary for each check or measurement.
        headline: one line for the summary.
        features: names of the features to prove; empty for all.
        slice: which of how many parts of the section's checks this process makes, from 1 on.
    """

    path: Path
    smoke: bool
    deadline: float
    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    headline: str = ""
    slice: tuple[int, int] = (1, 1)
    features: tuple[str, ...] = ()

    @property
    def platform(self) -> str:
        """Name of the platform under test."""
        return "cpu" if self.smoke else "cuda"

    @property
    def device(self) -> str:
        """``torch.device`` type of the platform under test."""
        return self.platform

    def remaining(self) -> float:
        """Seconds until the section should be done."""
        return self.deadline - time.monotonic()

    def row(
        self,
        name: str,
        *,
        passed: bool | None = None,
        ours: float | None = None,
        theirs: float | None = None,
        unit: str = "",
        **details: Any,
    ) -> None:
        """Add a row, print it and write the file.

        Args:
            name: what was checked or measured.
            passed: the verdict; None where there is nothing to pass.
            ours: the number measured on our side.
            theirs: the number on the other side, in the same unit.
            unit: of both.
            details: further keys of the row.
        """
        row: dict[str, Any] = {"name": name, "passed": passed}
        if ours is not None:
            row |= {"ours": ours, "theirs": theirs, "unit": unit}
            row["ratio"] = ours / theirs if theirs else None
        self.rows.append(row | details)
        self.write()
        mark = {True: "ok  ", False: "FAIL", None: "    "}[passed]
        numbers = "" if ours is None else f"  {ours:.6g} / {_shown(theirs)} {unit}"
        ratio = f"  ratio {row['ratio']:.3f}" if row.get("ratio") is not None else ""
        shown = ", ".join(f"{key} {_shown(value)}" for key, value in details.items() if _is_short(value))
        print(f"{mark} {name}{numbers}{ratio}{'  ' + shown if shown else ''}", flush=True)

    @contextmanager
    def check(self, name: str) -> Iterator[dict[str, Any]]:
        """Record a check: passed unless its body raises; the dictionary that the body fills joins the row."""
        found: dict[str, Any] = {}
        try:
            yield found
        except Exception as error:
            lines = traceback.format_exc().splitlines()[-12:]
            self.row(name, passed=False, **found, error=f"{type(error).__name__}: {error}", traceback=lines)
        else:
            self.row(name, passed=True, **found)

    def write(self) -> None:
        """Write the file."""
        content = {**self.facts, "headline": self.headline, "rows": self.rows}
        self.path.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _is_short(value: Any) -> bool:
    return isinstance(value, (int, float, str)) and len(str(value)) <= 160
