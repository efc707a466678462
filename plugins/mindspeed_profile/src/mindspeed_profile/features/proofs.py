"""Proofs of features that only watch: every bit is the same with and without them."""

from __future__ import annotations

from collections.abc import Mapping

from mindspeed_core.feature import Resume, Scenario

TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
PP2 = ("--pipeline-model-parallel-size", "2")


def unchanged(
    flags: tuple[str, ...],
    layouts: Mapping[str, tuple[str, ...]],
    *,
    files: tuple[str, ...] = (),
    further_steps: tuple[str, ...] = (),
) -> tuple[Scenario, ...]:
    """Return scenarios with and without a feature, and one that resumes in another layout.

    Args:
        flags: of the feature.
        layouts: flags of two ranks by name; none for a single process.
        files: see `Scenario.files`.
        further_steps: flags of the feature that let it watch on both sides of the checkpoint.
    """
    same = (
        Scenario(
            name,
            flags=(*layout, *flags),
            baseline=layout,
            world_size=2 if layout else 1,
            files=files,
            tolerance=0.0,
        )
        for name, layout in layouts.items()
    )
    watched = (*flags, *further_steps)
    resume = Resume(flags=(*PP2, *watched), world_size=2)
    return (*same, Scenario("resume", flags=(*TP2, *watched), world_size=2, files=files, resume=resume))
