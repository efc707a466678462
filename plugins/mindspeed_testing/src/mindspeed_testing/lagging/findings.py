"""Violations of a device's ordering rules, each with the two places in the code that take part."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

_HERE = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_FRAMES = 8
OF_LAUNCHES = 3
"""Frames that every operation is remembered with: taking them is what an operation costs most."""
_RULES = {
    "read without a wait": "let the reading stream wait for an event or for the writing stream",
    "written without a wait": "let the writing stream wait until the other one has finished",
    "freed while in use": "call Tensor.record_stream, or wait before the last reference goes",
    "emptied while in use": "wait before the storage is resized",
    "event never recorded": "record the event before anybody waits for it",
    "dropped without a wait": "keep the work and wait for it",
    "changed before the wait": "leave the input of a collective alone until its work was waited for",
}

_seen_code: dict[int, tuple[Any, bool]] = {}
"""Code objects by ``id``, each with whether its frames are left out; their hash reads all of their code."""

Frames = tuple[tuple[Any, int], ...]
"""Code objects and lines, the innermost first."""


def calling_frames(limit: int = _FRAMES) -> Frames:
    """Return where the code stands, without frames of torch and of this package.

    Args:
        limit: frames to return at most, the innermost ones.
    """
    frame: Any = sys._getframe(1)
    found: list[tuple[Any, int]] = []
    while frame is not None:
        code = frame.f_code
        seen = _seen_code.get(id(code))
        if seen is None:
            seen = _seen_code[id(code)] = code, code.co_filename.startswith((_TORCH, _HERE))
        if not seen[1]:
            found.append((code, frame.f_lineno))
            if len(found) == limit:
                break
        frame = frame.f_back
    return tuple(found)


def described(frames: Frames) -> str:
    """Return frames as lines, the innermost first."""
    return (
        "\n".join(f"      {_short(code.co_filename)}:{line} in {code.co_name}" for code, line in frames)
        or "      (outside of Python)"
    )


def _short(path: str) -> str:
    parts = Path(path).parts
    for mark in ("site-packages", "src"):
        if mark in parts:
            return "/".join(parts[len(parts) - parts[::-1].index(mark) :])
    return "/".join(parts[-4:])


@dataclass(frozen=True)
class Finding:
    """One violation.

    Attributes:
        rule: which one, a key of the table of rules.
        text: one sentence with the streams and the operation.
        here: where it showed.
        before: where the work was launched that is still under way; empty where there is none.
    """

    rule: str
    text: str
    here: Frames
    before: Frames = ()

    @property
    def key(self) -> tuple[str, Any, Any]:
        """Return what tells violations apart: the rule and both lines."""
        return self.rule, self.here[:1], self.before[:1]

    def __str__(self) -> str:
        """Return it with both stacks and the way out."""
        lines = [f"{self.rule}: {self.text}", "    here:", described(self.here)]
        if self.before:
            lines += ["    launched:", described(self.before)]
        return "\n".join([*lines, f"    {_RULES[self.rule]}"])


class LaggingDeviceError(RuntimeError):
    """A run relied on an order that nothing promises.

    Attributes:
        findings: what was found, each kind once.
    """

    def __init__(self, findings: Iterable[Finding]) -> None:
        """Describe all findings."""
        self.findings = tuple(findings)
        text = "\n".join(f"  {number}. {finding}" for number, finding in enumerate(self.findings, start=1))
        super().__init__(f"{len(self.findings)} order(s) that nothing promises:\n{text}")


@dataclass
class Findings:
    """Collects violations, each pair of places once.

    Attributes:
        reported: in the order in which they showed.
    """

    reported: list[Finding] = field(default_factory=list)
    _known: set[Any] = field(default_factory=set)

    def add(self, finding: Finding) -> None:
        """Add one that is not known yet."""
        if finding.key not in self._known:
            self._known.add(finding.key)
            self.reported.append(finding)

    def raise_any(self) -> None:
        """Raise what was found, and forget it.

        Raises:
            LaggingDeviceError: something was found.
        """
        reported, self.reported = self.reported, []
        self._known.clear()
        if reported:
            raise LaggingDeviceError(reported)
