"""The file of tokens per expert, layer and step: JSON lines, the first describes the run; no torch.

A run that is resumed appends a description and goes on, so that the last record of a step counts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_core.errors import UserError

FORMAT = "mindspeed-moe loads 1"


@dataclass(frozen=True)
class LoadedModel:
    """Facts of the run that a report needs.

    Attributes:
        experts: of a layer.
        ranks: that experts are spread over, in their order.
        node_size: ranks of experts on one node.
        choices: experts of a token.
        gathering_ranks: ranks that the allgather dispatcher would gather tokens of.
        tokens: of a rank and micro-batch.
        row_bytes: of a token's row.
        prob_bytes: of a probability.
        reached: nodes that a token may go to at most, 0 for all.
        dispatcher: its type.
    """

    experts: int
    ranks: int
    node_size: int
    choices: int
    gathering_ranks: int
    tokens: int
    row_bytes: int
    prob_bytes: int
    reached: int
    dispatcher: str


@dataclass(frozen=True)
class StepLoads:
    """Loads of one step, of all ranks together.

    Attributes:
        step: its number.
        chosen: by layer, choices of experts before any was dropped.
        loads: by layer, tokens of each expert.
    """

    step: int
    chosen: dict[int, int]
    loads: dict[int, list[int]]


@dataclass
class LoadLog:
    """A file that was read.

    Attributes:
        model: as the last run describes it.
        steps: in order.
    """

    model: LoadedModel
    steps: list[StepLoads] = field(default_factory=list)


def describe(path: Path, model: LoadedModel) -> None:
    """Begin a file, or go on with one; a line that a run left unfinished is taken away.

    Raises:
        UserError: the file cannot be written, or is something else.
    """
    try:
        if path.exists() and path.stat().st_size:
            with path.open("r+b") as file:
                if not file.readline().startswith(json.dumps({"format": FORMAT})[:-1].encode()):
                    raise UserError(f"--moe-load-log {path}: is no log of loads; name another file")
                _drop_unfinished_line(file)
        _append(path, {"format": FORMAT, **asdict(model)})
    except OSError as error:
        raise UserError(
            f"--moe-load-log {path}: {error.strerror or error}; name a file that can be written"
        ) from error


def append_step(path: Path, step: StepLoads) -> None:
    """Add one step."""
    _append(path, {"step": step.step, "chosen": step.chosen, "loads": step.loads})


def read_log(path: Path) -> LoadLog:
    """Read a file.

    Raises:
        UserError: it cannot be read, or one of its lines is damaged or cut off.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}; name a file that --moe-load-log wrote") from error
    model: LoadedModel | None = None
    steps: dict[int, StepLoads] = {}
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if "format" in record:
                if record.pop("format") != FORMAT:
                    raise ValueError("another format")
                model = _model(record)
                continue
            if model is None:
                raise ValueError("no description of a run before it")
            step = _step(record, model.experts)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(
                f"{path}, line {number}: is damaged or cut off ({error}); remove the line, or "
                "name another file"
            ) from error
        steps[step.step] = step
    if model is None or not steps:
        raise UserError(f"{path}: holds no loads; name a file that --moe-load-log wrote during a step")
    return LoadLog(model, [steps[number] for number in sorted(steps)])


def _append(path: Path, record: Any) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def _drop_unfinished_line(file: Any) -> None:
    file.seek(0)
    content = file.read()
    if not content.endswith(b"\n"):
        file.truncate(content.rfind(b"\n") + 1)


def _model(record: dict[str, Any]) -> LoadedModel:
    model = LoadedModel(**record)
    numbers = [model.experts, model.ranks, model.node_size, model.choices, model.gathering_ranks]
    if not all(isinstance(number, int) and number > 0 for number in numbers):
        raise ValueError("sizes below 1")
    if model.experts % model.ranks or model.ranks % model.node_size:
        raise ValueError("sizes that do not divide each other")
    return model


def _step(record: dict[str, Any], experts: int) -> StepLoads:
    loads = {int(layer): list(map(_count, counts)) for layer, counts in record["loads"].items()}
    chosen = {int(layer): _count(count) for layer, count in record["chosen"].items()}
    if not loads or loads.keys() != chosen.keys():
        raise ValueError("no loads of a layer")
    if any(len(counts) != experts for counts in loads.values()):
        raise ValueError(f"not {experts} experts")
    return StepLoads(_count(record["step"]), chosen, loads)


def _count(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def mean_loads(steps: Sequence[StepLoads]) -> dict[int, list[float]]:
    """Return by layer the mean tokens of each expert, over the steps that have the layer."""
    found: dict[int, list[list[int]]] = {}
    for step in steps:
        for layer, counts in step.loads.items():
            found.setdefault(layer, []).append(counts)
    return {
        layer: [sum(column) / len(rows) for column in zip(*rows, strict=True)]
        for layer, rows in sorted(found.items())
    }
