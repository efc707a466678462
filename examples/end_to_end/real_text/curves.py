"""Draw the losses of the three trainings: ``python curves.py WORK`` writes ``WORK/curves.svg``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mindspeed_train.monitoring.curves import svg_curve


def losses(folder: Path) -> list[tuple[int, float]]:
    """Return step and loss of each line of a training's log."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").split("\n")
    records = [json.loads(line) for line in lines if line]
    return [(each["step"], each["loss"]) for each in records if "grad_norm" in each]


def main(work: Path) -> None:
    """Draw one file."""
    curves = {step: losses(work / "logs" / step) for step in ("pretrain", "finetune", "lora")}
    drawn = svg_curve("loss (nats per token) of each training", curves)
    named = drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    (work / "curves.svg").write_text(named, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
