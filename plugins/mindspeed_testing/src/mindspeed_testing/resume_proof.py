"""Proof that a training continues from its checkpoint: in the layout that wrote it, and in another one."""

from __future__ import annotations

import math
import tempfile
from typing import Any

from mindspeed_core.feature import Resume, Scenario
from mindspeed_testing.compare import Comparison, Difference
from mindspeed_testing.compare_sides import Compared, compare_sides
from mindspeed_testing.training import Checkpoint, SideResult, train_side

_SAME, _OTHER = "resumed in the same layout", "resumed in the other layout"


def train_and_resume(
    scenario: Scenario, resume: Resume, **options: Any
) -> tuple[Comparison, tuple[Compared, ...], tuple[SideResult, ...]]:
    """Train, save, go on; continue from the checkpoint in both layouts, each in processes of its own.

    Args:
        scenario: the proof.
        resume: its ``resume``.
        options: of `train_side`.

    Returns:
        The comparison of both continuations with the training that went on, what was compared, and the three
        sides.
    """
    with tempfile.TemporaryDirectory(prefix="mindspeed-resume-") as folder:
        saves, loads = (Checkpoint(folder, scenario.steps, load) for load in (False, True))
        whole, same, other = (
            train_side(flags, size, resume.steps, checkpoint=checkpoint, **options)
            for flags, size, checkpoint in (
                (scenario.flags, scenario.world_size, saves),
                (scenario.flags, scenario.world_size, loads),
                (resume.flags, resume.world_size, loads),
            )
        )
    parts, compared = [], []
    for name, side, tolerance in ((_SAME, same, resume.tolerance), (_OTHER, other, scenario.tolerance)):
        found, counts = compare_sides(
            side,
            whole,
            tolerance=tolerance,
            quantities=scenario.quantities,
            demanded=scenario.compare,
            prefix=f"{name}: ",
        )
        parts.append(found)
        if side is other and not _warned(resume, other):
            detail = f"does not warn of {resume.warning!r}; it warns: {list(other.warnings) or 'nothing'}"
            parts.append(Comparison(0.0, (Difference(name, "load", math.inf, detail, within=False),)))
        compared.append(
            Compared(f"resumed on {side.layout}", f"uninterrupted on {whole.layout}", tolerance, counts)
        )
    return Comparison.of(parts, scenario.tolerance), tuple(compared), (whole, same, other)


def _warned(resume: Resume, side: SideResult) -> bool:
    return not resume.warning or any(resume.warning in text for text in side.warnings)
