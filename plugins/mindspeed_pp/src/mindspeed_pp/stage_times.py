"""Times of the parts of a step as a real run had them: kept in a file, and used in place of assumed ones."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from mindspeed_core.errors import UserError
from mindspeed_pp.actions import BACKWARD, FORWARD, INPUT_GRADIENT, RECOMPUTE, WEIGHT_GRADIENT
from mindspeed_pp.placement import Placement

Times = tuple[float, float, float]
"""Of forward, input gradient and weight gradient."""
StageTimes = tuple[Times, ...]
KEY = "pipeline_times"
"""Of a profile file, beside the events that viewers of traces read."""


@dataclass(frozen=True)
class Measured:
    """Times of a run.

    Attributes:
        stages: seconds of ``F``, ``B`` and ``W`` of one micro-batch, by pipeline stage.
        message: seconds from the end of an action to the arrival of what it sends.
        layers: of the model, None where nobody said.
    """

    stages: StageTimes
    message: float = 0.0
    layers: int | None = None

    def of_stages(self, placement: Placement) -> StageTimes:
        """Return the times of the stages of a placement, which may cut the same model otherwise.

        Each stage measured is taken as uniform inside: what a finer cut makes of it is only estimated. Every
        copy of the model takes as long.
        """
        known, count = len(self.stages), placement.depth
        bounds = [known * i / count for i in range(count + 1)]
        return placement.copies * tuple(
            (self._between(0, a, b), self._between(1, a, b), self._between(2, a, b))
            for a, b in itertools.pairwise(bounds)
        )

    def of_rank(self, ranks: int) -> Times:
        """Return the times of an average rank's whole share of the layers."""
        whole = [sum(stage[i] for stage in self.stages) / ranks for i in range(3)]
        return whole[0], whole[1], whole[2]

    def _between(self, kind: int, start: float, end: float) -> float:
        return sum(
            stage[kind] * max(0.0, min(end, at + 1) - max(start, at)) for at, stage in enumerate(self.stages)
        )


def times_of_spans(spans: Sequence[tuple[str, int, float]], stages: int) -> StageTimes:
    """Return the times of every stage, the median of its micro-batches.

    Args:
        spans: operation, stage and seconds of each action that ran alone.
        stages: of the model.

    A whole backward pass counts half as input and half as weight gradient where nothing says more.
    """
    found: dict[tuple[str, int], list[float]] = {}
    for op, stage, seconds in spans:
        found.setdefault((FORWARD if op == RECOMPUTE else op, stage), []).append(seconds)
    from statistics import median

    middle = {key: median(values) for key, values in found.items()}

    def of(stage: int) -> Times:
        forward = middle.get((FORWARD, stage), 0.0)
        whole = middle.get((BACKWARD, stage))
        backward, weight = middle.get((INPUT_GRADIENT, stage)), middle.get((WEIGHT_GRADIENT, stage))
        if backward is None or weight is None:
            return forward, (whole or 0.0) / 2, (whole or 0.0) / 2
        return forward, backward, weight

    return tuple(of(stage) for stage in range(stages))


def as_record(measured: Measured) -> dict[str, Any]:
    """Return what `read_times` reads."""
    return {
        "stages": [list(stage) for stage in measured.stages],
        "message": measured.message,
        "layers": measured.layers,
    }


@lru_cache(maxsize=8)
def read_times(path: str) -> Measured:
    """Read the times of a profile file; a file is read once in a process, also where it changes meanwhile.

    Raises:
        UserError: it cannot be read, or holds none.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: cannot be read ({error}); name a file that --profile-pipeline wrote"
        ) from error
    times = record.get(KEY) if isinstance(record, Mapping) else None
    try:
        stages = tuple((float(f), float(b), float(w)) for f, b, w in times["stages"])  # type: ignore[index]
        message, layers = float(times["message"]), times.get("layers")  # type: ignore[index,union-attr]
        sound = bool(stages) and min(map(min, stages)) >= 0 and sum(map(sum, stages)) > 0 and message >= 0
        layers = None if layers is None else int(layers)
    except (TypeError, ValueError, KeyError) as error:
        raise UserError(f"{path}: has no times of stages; name a file of --profile-pipeline") from error
    if not sound:
        raise UserError(f"{path}: times of its pipeline stages are no numbers above 0; measure them again")
    return Measured(stages, message, layers)
