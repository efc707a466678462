"""The feature that the README shows, trained for one step inside a world."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mindspeed_core.activation import activate
from mindspeed_core.registry import Registry
from mindspeed_testing.model_flags import training_flags
from mindspeed_train import loop


def train_with(source: str, run_dir: str) -> list[dict[str, Any]]:
    """Run the README's Python block, train one step with the class it defines, return what was logged."""
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(source, "README.md", "exec"), names)
    session = activate(
        training_flags(["--log-gradient-noise", "--run-dir", run_dir, "--no-progress"], 1),
        platform="cpu",
        registry=Registry.of([names["GradientNoise"]]),
        host="standalone",
    )
    with session:
        loop.train(session)
    lines = (Path(run_dir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
