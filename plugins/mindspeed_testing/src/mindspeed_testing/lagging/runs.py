"""Many short trainings on the lagging device in one process, which costs less than a world for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from mindspeed_testing.lagging.planting import PlantedFault, planted
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.training import RankRecord, SideRequest, train_rank

STEPS = 2


@dataclass(frozen=True)
class Training:
    """A training on the platform ``lagging``.

    Attributes:
        flags: of the command line, behind those of the small GPT.
        steps: to train.
        fault: planted into a module for its time.
        platform: another one in the place of ``lagging``.
    """

    flags: tuple[str, ...]
    steps: int = STEPS
    fault: PlantedFault | None = None
    platform: str = "lagging"


@dataclass(frozen=True)
class Outcome:
    """The end of a training on one rank; two that trained the same are equal.

    Attributes:
        numbers: losses and gradient norms of the steps, empty where it failed.
        error: the error, empty where there was none.
        sums: of the parameters in float64, and of their squares.
        recorded: what features recorded in the steps on this rank, no part of a comparison.
    """

    numbers: tuple[Any, ...] = ()
    error: str = ""
    sums: tuple[float, float] = (0.0, 0.0)
    recorded: Mapping[str, float] = field(default_factory=dict, compare=False)


def outcomes(trainings: Sequence[Training]) -> list[Outcome]:
    """Train one after another in this process, a rank of a world; return how each ended."""
    return [_outcome(training) for training in trainings]


def _outcome(training: Training) -> Outcome:
    context: Any = nullcontext() if training.fault is None else planted(training.fault)
    request = SideRequest(
        training_flags(training.flags, training.steps + 1),
        training.steps,
        gradients=False,
        platform=training.platform,
    )
    with context:
        try:
            record = train_rank(request)
        except Exception as error:
            return Outcome(error=f"{type(error).__name__}: {error}")
    return Outcome(_numbers(record), sums=_sums(record), recorded=record.recorded)


def _numbers(record: RankRecord) -> tuple[Any, ...]:
    return (*(tuple(sorted(losses.items())) for losses in record.losses), *record.grad_norms)


def _sums(record: RankRecord) -> tuple[float, float]:
    tensors = () if record.parameters is None else record.parameters.tensors.values()
    found = [tensor.double() for tensor in tensors if isinstance(tensor, torch.Tensor)]
    return sum(float(one.sum()) for one in found), sum(float(one.square().sum()) for one in found)
