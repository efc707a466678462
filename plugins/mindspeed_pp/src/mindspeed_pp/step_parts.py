"""The parts of a step that every action of a rank's list works with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mindspeed_pp.indexed_batches import IndexedBatches
from mindspeed_pp.mail import Mail
from mindspeed_pp.named import NamedAction
from mindspeed_pp.recorder import Recorder
from mindspeed_pp.schedule import Schedule
from mindspeed_pp.swaps import HostCopies
from mindspeed_pp.uneven_microbatches import Weighing
from mindspeed_pp.weight_gradients import WeightGradients

Place = tuple[int, int]
Combined = Callable[[Callable[[], None], Callable[[], None]], object]
"""Called with a forward and a backward pass, which depend on nothing of each other; calls both."""


@dataclass
class Parts:
    """Parts that a step works with.

    Attributes:
        run: the run in progress.
        config: megatron-core's configuration of the model.
        pg: the process groups.
        schedule: of the step.
        rank: this pipeline rank.
        models: this rank's chunks.
        batches: an iterator of each chunk, None where a chunk has none.
        forward_step_func: the host's.
        mail: to other stages.
        weight_gradients: those that were put off.
        device: of the model.
        forward_only: no backward passes.
        collect_non_loss_data: as megatron-core's schedules take it.
        first_val_step: likewise.
        weighing: of micro-batches of different sizes; None where all are alike.
        announce: called with every item of the list before it runs.
        recorder: that measures the batch.
        copies: makes or returns what brings tensors to the host.
        named: functions of other packages, by operation.
        combined: runs a forward pass beside a backward pass; None one after the other.
    """

    run: Any
    config: Any
    pg: Any
    schedule: Schedule
    rank: int
    models: list[Any]
    batches: list[IndexedBatches | None]
    forward_step_func: Callable[..., Any]
    mail: Mail
    weight_gradients: WeightGradients
    device: torch.device
    forward_only: bool = False
    collect_non_loss_data: bool = False
    first_val_step: bool | None = None
    weighing: Weighing | None = None
    announce: Callable[[int], object] = lambda item: None
    recorder: Recorder | None = None
    copies: Callable[[], HostCopies] | None = None
    named: Mapping[str, Callable[[NamedAction], object]] = field(default_factory=dict)
    combined: Combined | None = None
