"""Short trainings in a world whose optimizer's state is looked at, saved and loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mindspeed_core.activation import activate
from mindspeed_megatron.global_state import destroy_megatron_state
from mindspeed_testing.canonical import canonical_parameters
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.saved_state import saved_state
from mindspeed_train import loop

STEPS = 12
State = dict[str, torch.Tensor]


class Warnings(logging.Handler):
    """Keeps what was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Course:
    """A run that is set up."""

    def __init__(self, run: Any, said: list[str]) -> None:
        self.run = run
        self.said = said

    def train(self, steps: int) -> list[tuple[float, float]]:
        """Train, and return loss and norm of each step."""
        found = []
        for _ in range(steps):
            result = self.run.session.call("train_step", run=self.run)
            self.run.iteration += 1
            self.run.consumed_train_samples += self.run.args.global_batch_size
            found.append((result.losses["lm loss"], result.grad_norm))
        self.run.complete_parameters()
        return found

    def save(self) -> None:
        """Write a checkpoint."""
        self.run.complete_parameters()
        self.run.session.call("save_checkpoint", run=self.run, reason="end")

    def state(self) -> State:
        """Return what a checkpoint would hold of the optimizer; empty on other ranks than the first."""
        found = saved_state(self.run, with_optimizer=True)
        return {} if found is None else {key: value.clone() for key, value in found.optimizer.tensors.items()}

    def parameters(self) -> State:
        """Return the whole parameters; empty on other ranks than the first."""
        found = canonical_parameters(self.run)
        return {} if found is None else {key: value.clone() for key, value in found.tensors.items()}

    @property
    def inner(self) -> list[Any]:
        """Return the inner optimizers."""
        chained = getattr(self.run.optimizer, "chained_optimizers", [self.run.optimizer])
        return [part.optimizer for part in chained]


@contextmanager
def course(*flags: str) -> Iterator[Course]:
    """Set a run up, and tear it down behind."""
    said, logger = Warnings(), logging.getLogger("mindspeed_core")
    logger.addHandler(said)
    try:
        with activate(training_flags(flags, STEPS), platform="cpu", host="standalone") as session:
            yield Course(loop.setup(session), said.lines)
    finally:
        logger.removeHandler(said)
        destroy_megatron_state()


def of_kind(state: State, name: str) -> State:
    """Return the tensors of one name, under the keys of their parameters."""
    prefix = f"optimizer.state.{name}."
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def differing(one: State, other: State) -> int:
    """Count the numbers that are not the same to the bit."""
    assert one.keys() == other.keys()
    return sum(int((one[key] != other[key]).sum()) for key in one)


def distance(one: State, other: State) -> float:
    """Return the largest difference of a tensor over its largest number."""
    assert one.keys() == other.keys()
    return max(
        float((one[key] - other[key]).abs().max() / other[key].abs().max().clamp_min(1e-12)) for key in one
    )
