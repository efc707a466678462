"""The loss curve of a run as a PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw_loss_curve(
    history: Sequence[Mapping[str, Any]], path: Path, references: Mapping[str, float] | None = None
) -> None:
    """Draw training and validation loss over steps.

    Args:
        history: the objects of ``metrics.jsonl``.
        path: the PNG to write.
        references: horizontal lines by label, for instance the unigram entropy of the data.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    train = [(row["step"], row["loss"]) for row in history if row.get("loss") is not None]
    valid = [(row["step"], row["validation_loss"]) for row in history if "validation_loss" in row]
    if train:
        axes.plot(*zip(*train), label="training", linewidth=1.2)
    if valid:
        axes.plot(*zip(*valid), label="validation", marker="o", linewidth=1.2)
    for label, value in (references or {}).items():
        axes.axhline(value, linestyle="--", linewidth=1.0, color="grey", label=f"{label} ({value:.3f})")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
